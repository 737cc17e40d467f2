"""Attaching to vLLM servers of others: the command that starts one, and what is said without."""

import itertools
import shlex

import pytest
import yaml
from aiohttp import web

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import launch
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.extras.vllm_setup.command import server_command
from openenv_pipe.system.process import free_port
from tests.small_vllm import SmallServer
from tests.stub_server import answering

HUB = ("conf=wordle_qwen3", "model.path=Some/Model")


@pytest.mark.parametrize("key", ["engine.url", "++engine.url"])
def test_the_command_has_all_that_a_run_asks_of_the_server(key):
    words = shlex.split(server_command([*HUB, f"{key}=http://10.0.0.7:9000"], "cpu", "shell"))
    assert {"VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"} <= set(words)
    assert {"--enable-scale-out", "--enable-lora"} <= set(words)
    values = dict(itertools.pairwise(words))
    assert (values["--host"], values["--port"]) == ("10.0.0.7", "9000")
    assert (values["--model"], values["--served-model-name"]) == ("Some/Model", "base")
    assert values["--worker-extension-cls"] == "openenv_pipe_worker.PolicyWorker"


def test_the_compose_file_says_the_same_and_prints_no_key():
    overrides = (*HUB, "engine.api_key=a-secret", "engine.variables.OF_A_USER=a$b")
    text = server_command(overrides, "cuda", "compose")
    service = yaml.safe_load(text)["services"]["vllm-0"]
    assert "--enable-scale-out" in service["command"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert service["environment"]["OF_A_USER"] == "a$$b"
    assert "a-secret" not in text + server_command(overrides, "cuda", "shell")


def test_a_model_that_only_the_run_can_write_is_rejected():
    with pytest.raises(ConfigError, match=r"model\.type=tiny.*engine\.launch=managed"):
        server_command(["conf=smoke"], "cpu", "shell")


def attached(url):
    config = compose(["conf=smoke", "engine=vllm", "engine.launch=attach", f"engine.url={url}"])
    return launch.AttachedVllmServer(url, config.config.engine)


async def test_a_server_that_does_not_exist_is_said_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(launch, "FIND_LIMIT_S", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"{url} is not a running vLLM server.*engine command"):
        await attached(url).start()


async def test_a_server_that_is_no_vllm_is_said(monkeypatch):
    monkeypatch.setattr(launch, "FIND_LIMIT_S", 0.0)

    async def nothing(request):
        raise web.HTTPNotFound

    async with answering(nothing) as url:
        with pytest.raises(EngineError, match="answers /health with status 404"):
            await attached(url).start()


async def test_a_server_that_comes_back_later_is_waited_for(tmp_path):
    small = SmallServer(tmp_path / "log")
    await small.start()
    server = attached(small.url)
    await server.start()
    await small.stop()
    await server.start()  # a restart; `Replica` waits for the answer


async def test_a_path_that_is_missing_is_said_with_what_adds_it(tmp_path):
    small = SmallServer(tmp_path / "log")
    await small.start()
    try:
        async with VllmClient(small.url, api_key=None, request_timeout_s=60) as client:
            with pytest.raises(EngineError, match=r"404.*--enable-scale-out.*engine command"):
                await client.generate("nobody", [1], {"max_tokens": 2})
    finally:
        await small.stop()
