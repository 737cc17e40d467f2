"""The command and environment of a vLLM server, and the settings that are rejected."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import turn_seed
from openenv_pipe.engines.vllm import endpoint as serving
from openenv_pipe.engines.vllm import launch
from openenv_pipe.engines.vllm import weights_folder as weights_folder_module
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.installed import python_path
from openenv_pipe.engines.vllm.server_command import (
    ServerSpec,
    process_environment,
    server_arguments,
    server_variables,
)
from openenv_pipe.engines.vllm.server_log import first_error, log_size
from openenv_pipe.engines.vllm.weights_folder import full_as_config_error, weights_folder
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.serving.serve import _served, serve
from openenv_pipe.extras.containers.docker.start_guard import owner_label
from openenv_pipe.extras.containers.docker.vllm_server import docker_command
from openenv_pipe.models.chat.served_template import served_template
from openenv_pipe.models.load import load_chat
from openenv_pipe.models.replies.formats import FORMATS
from openenv_pipe.system.process import free_port
from openenv_pipe.system.process_id import ProcessId
from tests.vllm_server import installed_vllm


@cache
def engine(*overrides: str):
    return compose(["conf=smoke", "engine=vllm", *overrides]).config.engine


def spec(**changes) -> ServerSpec:
    values = {"model": "/m", "revision": None, "build": "cpu", "dtype": "float32", "lora_rank": 0}
    return ServerSpec(**(values | changes))


def test_logprobs_are_those_of_what_is_sampled():
    """Trap 5."""
    arguments = server_arguments(spec(), engine(), "127.0.0.1", 1)
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert arguments[arguments.index("--generation-config") + 1] == "vllm"


def test_a_cpu_gets_no_chunked_prefill_and_a_gpu_its_share_of_memory():
    cpu = server_arguments(spec(), engine("env.max_episode_tokens=512"), "127.0.0.1", 1)
    assert "--no-enable-chunked-prefill" in cpu and "--gpu-memory-utilization" not in cpu
    gpu = server_arguments(spec(build="cuda"), engine("engine.gpu_memory_share=0.3"), "h", 1)
    assert gpu[gpu.index("--gpu-memory-utilization") + 1] == "0.3"
    assert "--no-enable-chunked-prefill" not in gpu
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_variables(spec(build="cuda"), engine(), "/i")


@pytest.mark.parametrize(("rank", "allowed"), [(1, "8"), (8, "8"), (9, "16"), (130, "256")])
def test_adapters_get_a_rank_that_vllm_knows(rank, allowed):
    arguments = server_arguments(spec(lora_rank=rank), engine(), "127.0.0.1", 1)
    assert arguments[arguments.index("--max-lora-rank") + 1] == allowed
    assert arguments[arguments.index("--max-loras") + 1] == "2"
    assert "--enable-lora" not in server_arguments(spec(), engine(), "127.0.0.1", 1)


@pytest.mark.parametrize(
    "argument",
    ["--logprobs-mode=raw_logprobs", "--override-generation-config={top_p: 0.9}", "--model"],
)
def test_what_would_falsify_logprobs_is_rejected(argument):
    """Traps 5 and 6: these settings would falsify logprobs."""
    with pytest.raises(ConfigError, match=r"arguments must not contain .*: "):
        engine(f"engine.arguments=['{argument}']")


def test_a_grammar_is_no_setting():
    """Trap 6: logprobs under a grammar's mask are not the policy's."""
    with pytest.raises(ConfigError, match="structured_outputs"):
        engine("engine.sampling.structured_outputs={regex: a}")


def test_check_says_what_is_there_and_how_to_get_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="engine install vllm --build cpu` installs it"):
        check_engine(engine(), "cpu", "full")
    port = free_port()
    attached = engine("engine.launch=attach", f"engine.url=http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"engine.url=http://127.0.0.1:{port} does not answer"):
        check_engine(attached, "cpu", "full")


def test_a_server_gets_variables_for_computing_but_those_of_our_python(tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    environment = process_environment(str(tmp_path), {"PYTHONPATH": "/inside"})
    assert (environment["CUDA_HOME"], environment["PYTHONPATH"]) == ("ours", "/inside")
    assert environment["VLLM_NO_USAGE_STATS"] == environment["PYTHONUNBUFFERED"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1" and "VIRTUAL_ENV" not in environment
    of_a_hub = process_environment("Qwen/Qwen3-0.6B", {})
    assert "HF_HUB_OFFLINE" not in of_a_hub and "PYTHONPATH" not in of_a_hub


@pytest.fixture
def started(monkeypatch) -> list[dict[str, str]]:
    """Record the environments of processes instead of starting them."""
    environments: list[dict[str, str]] = []

    def noted(command, *, environment, scratch, **_):
        given = dict(environment)
        assert scratch.is_dir() and given.pop("VLLM_RPC_BASE_PATH") == str(scratch)
        assert given.pop("TMPDIR") == str(scratch)
        environments.append(given)
        raise NotADirectoryError  # the recorded environment is all that the tests need

    monkeypatch.setattr(launch, "ManagedProcess", noted)
    return environments


def served_model(model, **changes):
    values = {"name": "policy", "model": model, "revision": None, "adapter": None, "lora_rank": 0}
    return serving.Served(**values, dtype="float32", max_model_len=64, **changes)


async def endpoint(folder, host="127.0.0.1", extra=()):
    await serve(
        served_model(str(folder), chat_template=None),
        SimpleNamespace(python="python", build="cpu"),
        title="run",
        host=host,
        port=free_port(),
        extra=extra,
        start_timeout_s=1.0,
        log=folder / "engine.log",
        notify=print,
        check=None,  # no server ever starts here
    )


@pytest.mark.parametrize(
    "extra",
    [
        ["--host", "0.0.0.0"],
        ["--host=0.0.0.0"],
        ["--hos", "0.0.0.0"],
        ["--dtype", "float32", "--port=1"],
        ["--api-key", ""],
        ["--api_key="],
        ["--config", "open.yaml"],
    ],
)
async def test_no_argument_for_vllm_opens_an_endpoint_to_others(
    extra, started, tmp_path, monkeypatch
):
    """vLLM would take the last --host, and an empty --api-key switches its check off."""
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-a-user")
    with pytest.raises(ConfigError, match=r"cannot be passed on to vLLM; set "):
        await endpoint(tmp_path, extra=extra)
    assert not started


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", ""), ("", ""), ("::", " "), ("127.1", "")])
async def test_a_public_endpoint_needs_a_key(host, key, started, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set"):
        await endpoint(tmp_path, host)
    assert not started


async def test_runs_and_endpoints_start_servers_in_this_environment(started, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_API_KEY", "a-user-s")
    log = tmp_path / "engine.log"
    server = launch.VllmProcess(spec(model=str(tmp_path)), engine(), Path("python"), log)
    with pytest.raises(NotADirectoryError):
        await server.start()
    with pytest.raises(NotADirectoryError):
        await endpoint(tmp_path)
    of_a_run, of_an_endpoint = started
    own = {**server_variables(spec(), engine(), python_path(sees_images=False))}
    own |= {"VLLM_API_KEY": server.key}
    assert of_a_run == process_environment(str(tmp_path), own) and server.key != "a-user-s"
    # serving lets the user's own cache size and key stand
    own = {"VLLM_CPU_KVCACHE_SPACE": "3", "PYTHONPATH": python_path(sees_images=False)}
    own |= {"VLLM_API_KEY": "a-user-s"}
    assert of_an_endpoint == process_environment(str(tmp_path), own)


def test_a_container_sees_the_weights_under_their_own_name():
    label = owner_label()
    command = docker_command(
        spec(build="cuda", lora_rank=8),
        engine(),
        [Path("/dev/shm/w")],
        4000,
        label,
        Path("/logs"),
        Path("/guard/variables"),
    )
    assert "--volume=/dev/shm/w:/dev/shm/w:ro" in command
    assert "127.0.0.1:4000:8000" in command  # other machines cannot reach the port
    image = command.index("vllm/vllm-openai:v0.32.0")
    assert command[image - 2 : image] == ["--entrypoint", "python3"]
    assert command[image + 1 : image + 3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--env-file") + 1] == "/guard/variables"
    assert "--gpus=all" in command
    # `prune` reads the owner from the label; the guard of the environments' containers does not
    # take it for one of its own.
    assert ProcessId.model_validate_json(label) == ProcessId.of_this_process()
    assert label != ProcessId.of_this_process().model_dump_json() != owner_label()


def test_seeds_differ_for_every_turn_and_episode():
    seeds = {turn_seed(episode, turn) for episode in range(50) for turn in range(20)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**63
    assert turn_seed(7, 3) == 3647706739097066463  # a change of this number would change all runs


def test_weights_of_a_killed_trainer_are_removed_by_its_guardian(tmp_path):
    script = (
        "import os, signal, sys; from openenv_pipe.engines.vllm.weights_folder import *\n"
        "with weights_folder(sys.argv[1]) as folder:\n"
        "    print(folder, folder.exists(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    folder, existed = killed.stdout.split()
    assert existed == "True" and Path(folder).parent == tmp_path
    deadline = time.monotonic() + 60
    while Path(folder).exists():
        assert time.monotonic() < deadline, "the guardian has removed nothing"
        time.sleep(0.01)


def test_weights_that_no_guardian_has_removed_are_removed_by_the_next_run(tmp_path):
    left = tmp_path / f"openenv-pipe-{os.getuid()}-1"
    left.mkdir()
    dead = ProcessId.of_this_process().model_copy(update={"pid": 2**22 + 1})
    (left / "owner.json").write_text(dead.model_dump_json())
    with weights_folder(str(tmp_path)) as folder:
        assert not left.exists()
        assert json.loads((folder / "owner.json").read_text())["pid"]
        with weights_folder(str(tmp_path)) as other:
            assert folder.exists() and other != folder
    assert list(tmp_path.iterdir()) == []


def test_a_full_weights_folder_is_said_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_folder_module, "IN_MEMORY", tmp_path)
    said = rf"engine.weights_dir=null: .* do not fit into {tmp_path} .*free space.*--shm-size"
    with (
        pytest.raises(ConfigError, match=said),
        full_as_config_error(None),
        weights_folder(None) as folder,
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "step-1"))
    assert list(tmp_path.iterdir()) == []


def test_another_full_folder_is_not_taken_for_that_of_the_weights(tmp_path):
    with pytest.raises(OSError, match="checkpoints"), full_as_config_error(str(tmp_path)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "checkpoints"))


@pytest.fixture
def shared_place():
    """A folder like /dev/shm: every user may write, and only rename or remove what is his."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o1777)
        yield place


def as_another_user(script: str, *arguments: object) -> str:
    """Run shell commands as the user nobody, and return what they print."""
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *map(str, arguments)],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_take_over_nor_read_the_weights(shared_place, monkeypatch):
    """He makes every folder that he can guess, and links to a folder of this user."""
    monkeypatch.setattr(weights_folder_module, "IN_MEMORY", shared_place)
    victim = shared_place / "victim"
    victim.mkdir(mode=0o755)
    dead = ProcessId.of_this_process().model_copy(update={"pid": 2**22 + 1}).model_dump_json()
    (victim / "owner.json").write_text(dead)
    plant = """
        cd "$1"; umask 0
        for name in openenv-pipe-$2 openenv-pipe-$2-1 run-1; do
            mkdir -m 777 $name; printf %s "$3" > $name/owner.json
        done
        ln -s "$1/victim" openenv-pipe-$2-2
    """
    as_another_user(plant, shared_place, os.getuid(), dead)
    with weights_folder(None) as folder:
        (folder / "step-1").mkdir()
        attack = """
            ls "$1" || echo denied
            cat "$1/owner.json" || echo denied
            mv "$1" "$1-mine" || echo denied
            mv "$1/step-1" "$1/step-2" || echo denied
            rmdir "$1" || echo denied
            mkdir "$1/x" || echo denied
            ln -s / "$1/link" || echo denied
        """
        assert as_another_user(attack, folder).split() == ["denied"] * 7
        assert folder.parent == shared_place
    assert (victim / "owner.json").exists()  # no link of his made us remove it
    assert (shared_place / f"openenv-pipe-{os.getuid()}-1" / "owner.json").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.chmod(0o777),
        pytest.param(
            lambda folder: os.chown(folder, 65534, 65534),
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away"),
        ),
    ],
    ids=["open to all", "of another user"],
)
def test_weights_are_not_written_where_others_can_replace_them(tmp_path, spoil):
    folder = tmp_path / "weights"
    folder.mkdir()
    spoil(folder)
    rejected = pytest.raises(ConfigError, match=rf"{folder}: .*set engine\.weights_dir")
    with rejected, weights_folder(str(folder)):
        pass


def test_a_served_run_takes_tools_whatever_its_adapter(tmp_path):
    """A program's model calls tools too, and vLLM rejects them without these arguments.

    The template, which shows no `tool_calls`, is replaced by one that does.
    """
    config = compose(["conf=echo"]).config
    chat = load_chat(config.model)
    folder = SimpleNamespace(record=SimpleNamespace(id="echo/0001"))
    subject = SimpleNamespace(config=config, folder=folder, checkpoint=tmp_path)
    with _served(subject, chat, None) as served:
        arguments = serving.serving_arguments(served, "cpu", "127.0.0.1", 8000, [])
        template = Path(arguments[arguments.index("--chat-template") + 1])
        assert template.read_text() == served_template(chat)
    assert "--enable-auto-tool-choice" in arguments


@pytest.mark.parametrize("form", FORMATS)
def test_vllm_has_a_parser_of_the_calls_that_a_served_model_writes(form):
    served = served_model("/m", call_format=form)
    arguments = serving.serving_arguments(served, "cpu", "127.0.0.1", 1, ())
    parser = arguments[arguments.index("--tool-call-parser") + 1]
    if isinstance(installed := installed_vllm(), str):
        pytest.skip(installed)
    (listed,) = (
        Path(installed.python)
        .parents[1]
        .glob("lib/python3*/site-packages/vllm/tool_parsers/__init__.py")
    )
    assert f'"{parser}": (' in listed.read_text()


def test_the_first_error_of_a_log_is_that_of_the_process_that_failed(tmp_path):
    log = tmp_path / "engine.log"
    assert first_error(log, 0) == ""
    log.write_text("ValueError: of the server before\n")
    begin = log_size(log)
    with log.open("a") as file:
        print(
            "(APIServer pid=5) WARNING 1-2 [a.py:1] fd limits like `OSError: [Errno 24]`", file=file
        )
        file.flush()
        assert first_error(log, begin) == ""
        print("(Worker pid=7) ERROR 11-26 [b.py:106] AttributeError: no float32", file=file)
        print("(EngineCore pid=6) ERROR 11-26 [c.py:9] RuntimeError: Worker failed", file=file)
    assert first_error(log, begin) == "AttributeError: no float32"
    assert first_error(log, 0) == "ValueError: of the server before"
