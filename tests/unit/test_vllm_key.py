"""Who may use a vLLM server that this program starts: the key, its way, and what is reachable."""

import asyncio
import inspect
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import launch
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.extras.containers.docker import vllm_server as vllm_container
from openenv_pipe.extras.judges import vllm_server
from openenv_pipe.extras.vllm_setup.command import server_command
from openenv_pipe.system.secrets import SERVER_SIDE, redact
from openenv_pipe.system.server_side.openenv_pipe_key import OnlyClients, OnlyTheRun
from tests.stub_server import answering

KEY = "a-key-of-this-test"
OWN = ("host", "127.0.0.1:8000")
GIVEN = ("authorization", f"Bearer {KEY}")
CONFIG = compose(["conf=echo", "engine=vllm"]).config.engine
SPEC = ServerSpec(model="/model", revision=None, build="cpu", dtype="float32", lora_rank=0)


def asked(access, *headers, method="POST", path="/collective_rpc", kind="http"):
    """Return the status of a request, and what the server behind was given of its headers."""
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": kind, "method": method, "path": path, "headers": encoded}
    asyncio.run(access(app)(scope, None, send))
    assert bool(passed) == (sent[0].get("status") == 200)
    return sent[0].get("status", sent[0]["type"]), passed


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.delenv("OPENENV_PIPE_HOSTS", raising=False)


def test_connections_of_its_web_server_are_limited():
    code = """
import uvicorn

async def app(scope, receive, send): pass

config = uvicorn.Config(app, http="httptools", proxy_headers=False)
config.load()
print([each.__name__ for each in config.http_protocol_class.__mro__][1], config.loaded_app is app)
"""
    variables = {**os.environ, "PYTHONPATH": str(SERVER_SIDE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == "BoundedConnection True\n", done.stderr


@pytest.mark.parametrize("access", [OnlyTheRun, OnlyClients])
@pytest.mark.parametrize("path", ["/collective_rpc", "/health", "/v1/models", "/docs", "/none"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer another")],
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("authorization", "Bearer ")],
        [("x-key", f"Bearer {KEY}")],
        [("cookie", f"authorization=Bearer {KEY}")],
    ],
)
def test_every_request_needs_the_key_whatever_its_path(access, path, headers):
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        assert asked(access, OWN, *headers, method=method, path=path) == (401, [])
    assert asked(access, OWN, *headers, path=path, kind="websocket") == ("websocket.close", [])


@pytest.mark.parametrize("given", [GIVEN, ("authorization", f"bearer {KEY}"), ("x-api-key", KEY)])
def test_the_key_comes_in_the_headers_of_the_public_apis(given):
    """vLLM, which checks it too, gets it in the only form that it knows."""
    status, (headers,) = asked(OnlyTheRun, OWN, given)
    assert status == 200 and headers[b"authorization"] == f"Bearer {KEY}".encode()


def test_a_name_that_anybody_can_make_mean_this_machine_is_rejected():
    for host in ("127.0.0.1:8000", "localhost:1", "[::1]:8000", "10.0.0.7:8000"):
        assert asked(OnlyTheRun, GIVEN, ("host", host))[0] == 200, host
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1", ""):
        assert asked(OnlyTheRun, GIVEN, ("host", host))[0] == 403, host


def test_names_that_the_user_gives_the_server_are_its_own(monkeypatch):
    for names, host in (("gpu-box", "GPU-box:8000"), ("*", "any.example")):
        monkeypatch.setenv("OPENENV_PIPE_HOSTS", names)
        assert asked(OnlyTheRun, GIVEN, ("host", host))[0] == 200
    monkeypatch.setenv("OPENENV_PIPE_HOSTS", "gpu-box")
    assert asked(OnlyTheRun, GIVEN, ("host", "evil.example"))[0] == 403


def test_pages_of_other_sites_are_rejected():
    assert asked(OnlyTheRun, OWN, GIVEN, ("origin", "http://127.0.0.1:8000"))[0] == 200
    for origin in ("http://127.0.0.1:8001", "http://evil.example", "null", "http://["):
        assert asked(OnlyTheRun, OWN, GIVEN, ("origin", origin))[0] == 403, origin


def test_a_run_s_server_serves_nothing_that_the_run_does_not_use():
    for method, paths in {
        "GET": "/collective_rpc /openapi.json /docs /inference/v1/generate",
        "POST": "/v1/chat/completions /scale_elastic_ep /abort_requests //collective_rpc "
        "/inference/v1/abort_requests /collective_rpc/",
    }.items():
        for path in paths.split():
            assert asked(OnlyTheRun, OWN, GIVEN, method=method, path=path)[0] == 404, path


def test_a_served_model_cannot_be_changed():
    for status, paths in {
        200: "/v1/chat/completions /v1/messages /health",
        404: "/v1/load_lora_adapter /collective_rpc /inference/v1/generate /update_weights",
    }.items():
        for path in paths.split():
            assert asked(OnlyClients, OWN, GIVEN, path=path)[0] == status, path


def test_no_server_starts_without_a_key(monkeypatch):
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("VLLM_API_KEY")
        else:
            monkeypatch.setenv("VLLM_API_KEY", value)
        with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
            OnlyTheRun(None)


ARGUMENTS = {
    "model": "base",
    "token_ids": [1],
    "sampling": {"max_tokens": 1},
    "wanted": [1],
    "temperature": 1.0,
    "limit_s": 5.0,
    "name": "a",
    "folder": Path("/a"),
    "version": "1",
    "meeting": Path("/a"),
    "level": 1,
    "what": "weights",
    "backend": "nccl",
    "learner": "1",
    "init_info": {},
    "update_info": {},
    "chunk": {},
    "buffer": {},
    "messages": [],
    "tools": [],
    "owner": "a",
    "exclusive": True,
    "lease_s": 30.0,
}


async def test_whatever_the_client_sends_is_served():
    seen = set()

    async def answer(request):
        seen.add((request.method, request.path))
        return web.json_response({})

    async with (
        answering(answer) as url,
        VllmClient(url, api_key=KEY, request_timeout_s=5) as client,
    ):
        for name, method in inspect.getmembers(VllmClient, inspect.iscoroutinefunction):
            if name.startswith("_"):
                continue
            needed = [
                ARGUMENTS[each.name]
                for each in list(inspect.signature(method).parameters.values())[1:]
                if each.default is inspect.Parameter.empty
            ]
            with suppress(EngineError):  # the answers are empty
                await method(client, *needed)
        async with client.replacing_weights():
            pass
    assert len(seen) >= 20
    of_a_run, of_serve = OnlyTheRun(None), OnlyClients(None)
    seen.remove(("POST", "/tokenize"))  # `serve` alone asks its server this
    assert of_serve.serves("POST", "/tokenize")
    assert [each for each in seen if not of_a_run.serves(*each)] == []


@pytest.fixture
def started(monkeypatch):
    """Records the commands and environments of processes instead of starting them."""
    found = []

    def noted(command, *, environment, **_):
        found.append((list(command), dict(environment)))
        raise NotADirectoryError

    monkeypatch.setattr(launch, "ManagedProcess", noted)
    return found


async def test_each_managed_server_has_a_key_that_no_process_list_and_no_log_shows(
    started, tmp_path
):
    servers = [VllmProcess(SPEC, CONFIG, Path("python"), tmp_path / "log") for _ in range(2)]
    for server in servers:
        with suppress(NotADirectoryError):
            await server.start()
    keys = [server.key for server in servers]
    assert len(set(keys)) == 2 and KEY not in keys and min(map(len, keys)) >= 40
    for (command, environment), key in zip(started, keys, strict=True):
        assert environment["VLLM_API_KEY"] == key
        assert key not in " ".join(command)
        assert command[command.index("--middleware") + 1] == "openenv_pipe_key.OnlyTheRun"
    assert keys[0] not in redact(f"it said {keys[0]}")


async def test_a_container_gets_its_variables_by_a_file_that_only_this_user_reads(
    tmp_path, monkeypatch
):
    """`ps` shows arguments to everybody."""
    started = []

    def noted(command, **options):
        path = Path(command[command.index("--env-file") + 1])
        started.append((command, options["environment"], path.stat().st_mode, path.read_text()))
        raise NotADirectoryError

    async def ready(*_):
        """There is no daemon."""

    monkeypatch.setattr(vllm_container, "check_launch", lambda config: "")
    monkeypatch.setattr(vllm_container, "start_guard", lambda *_: None)
    monkeypatch.setattr(vllm_container, "wait_for_guard", ready)
    monkeypatch.setattr(vllm_container, "ManagedProcess", noted)
    monkeypatch.setenv("DATABASE_URL", "postgres://me:pass-word@host")
    config = CONFIG.model_copy(update={"variables": {"S3": "a secret of it", "DSN_OF_IT": None}})
    monkeypatch.setenv("DSN_OF_IT", "another")
    container = vllm_container.VllmContainer(SPEC, config, tmp_path / "log", [])
    with pytest.raises(NotADirectoryError):
        await container.start()
    ((command, environment, mode, text),) = started
    assert not any(each in " ".join(command) for each in (container.key, "a secret", "another"))
    assert stat.S_IMODE(mode) == 0o600 and "pass-word" not in str(environment) + text
    lines = text.splitlines()
    assert {"S3=a secret of it", "DSN_OF_IT=another", f"VLLM_API_KEY={container.key}"} < {*lines}
    assert "openenv_pipe_key.OnlyTheRun" in command


def test_a_value_of_several_lines_cannot_be_given_to_a_container():
    with pytest.raises(ConfigError, match=r"engine\.variables\.PEM has several lines"):
        vllm_container.variables_file({"PEM": "a\nb"})


def test_the_command_for_an_attached_server_asks_for_a_key_and_prints_none():
    given = ["conf=wordle_qwen3", "model.path=Some/Model", "engine.url=http://gpu-box:9000"]
    shell = server_command(given, "cpu", "shell")
    assert 'VLLM_API_KEY="${VLLM_API_KEY:?set it to a secret' in shell
    assert "OPENENV_PIPE_HOSTS=gpu-box" in shell
    assert "openenv_pipe_key.OnlyTheRun" in shell
    assert "${VLLM_API_KEY:?set it" in server_command(given, "cpu", "compose")


async def test_an_attached_server_that_asks_for_a_key_says_which_setting_it_is(monkeypatch):
    async def reject(request):
        given = request.headers.get("Authorization")
        return web.Response(status=200 if given == "Bearer right" else 401)

    monkeypatch.setattr(launch, "FIND_LIMIT_S", 0.0)
    async with answering(reject, "/health") as url:
        given = ["conf=echo", "engine=vllm", "engine.launch=attach", f"engine.url={url}"]
        without = compose(given).config.engine
        right = compose([*given, "engine.api_key=right"]).config.engine
        with pytest.raises(EngineError, match=r"401: set engine\.api_key"):
            await launch.AttachedVllmServer(url, without).start()
        await launch.AttachedVllmServer(url, right).start()
        with pytest.raises(ConfigError, match=r"401: set engine\.api_key"):
            await asyncio.to_thread(check_engine, without, "cpu", 0)
        assert "answers" in await asyncio.to_thread(check_engine, right, "cpu", 0)


async def test_a_judge_s_own_server_has_a_key_of_its_own(monkeypatch, tmp_path):
    found = []

    class Server:
        async def __aenter__(self):
            return SimpleNamespace(alive=True)

        async def __aexit__(self, *_):
            pass

    def running(*_, key, **given):
        found.append(key)
        return Server()

    monkeypatch.setattr(vllm_server, "running", running)
    installed = SimpleNamespace(build="cpu", python="python")
    monkeypatch.setattr(vllm_server, "require_installed", lambda _: installed)
    given = ["judge.model=/judge", "judge.max_model_len=256", "judge.max_reply_tokens=64"]
    config = compose(["conf=echo", "reward=ruler", "judge=vllm", *given]).config.judge
    async with vllm_server.VllmJudgeClient(config, tmp_path / "log") as client:
        chat = await client._start()
    assert found[0] != KEY and len(found[0]) >= 40
    assert chat._config.api_key == found[0]
