"""vLLM servers that a worker keeps between its jobs: which job gets which, and in what state."""

import asyncio
import itertools
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import launch
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.extras.sweeps import kept_vllm as kept_module
from openenv_pipe.extras.sweeps.kept_vllm import KeptProcesses, cleared, model_digest
from tests.small_vllm import SmallServer

LIMIT_S = 120.0
CONFIG = compose(["conf=echo", "engine=vllm"]).config.engine


def spec_of(model="/tmp/model", **changes) -> ServerSpec:
    known = {"revision": None, "build": "cpu", "dtype": "float32", "lora_rank": 0}
    return ServerSpec(**{"model": str(model), **known, **changes})


class FakeProcess:
    """The process of a server."""

    def __init__(self, log: list[str], number: int) -> None:
        self.alive = True
        self.number = number
        self._log = log
        log.append(f"start {number}")

    async def exited(self) -> str:
        while self.alive:
            await asyncio.sleep(0)
        return "exit code 9"

    async def stopped(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        if self.alive:
            self._log.append(f"stop {self.number}")
        self.alive = False


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Starts and stops of processes, in order."""
    found: list[str] = []
    numbers = itertools.count()
    monkeypatch.setattr(
        launch, "server_process", lambda *_: FakeProcess(found, next(numbers)), raising=True
    )
    return found


@pytest.fixture
def clean(monkeypatch) -> list[bool]:
    """Whether servers can be cleared; it is asked for its first entry."""
    answers = [True]

    async def look(url: str, key: str) -> bool:
        return answers[0]

    monkeypatch.setattr(kept_module, "cleared", look)
    return answers


@pytest.fixture
def reports() -> list[bool]:
    return []


@pytest.fixture
async def kept(tmp_path, events, clean, reports):
    kept = KeptProcesses(tmp_path / "logs", reports.append)
    yield kept
    await kept.close()
    starts = [event.split()[1] for event in events if event.startswith("start")]
    assert sorted(starts) == sorted(each.split()[1] for each in events if "stop" in each)


@pytest.fixture
def use(kept, tmp_path):
    """Run a job on servers of these specs, without requests; return the servers."""
    numbers = itertools.count()

    async def use_servers(content: str = "a", count: int = 1, **changes):
        folder = tmp_path / f"written/run-{next(numbers)}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(content)
        specs = [spec_of(folder, number=number, **changes) for number in range(count)]
        servers = await kept.servers(
            ManagedLaunch(
                specs=specs,
                config=CONFIG,
                python=Path(),
                logs=tmp_path,
                weights_dir=tmp_path / "written",
            )
        )
        await asyncio.gather(*(server.start() for server in servers))
        await asyncio.gather(*(server.stop() for server in servers))
        return servers

    return use_servers


async def test_jobs_of_one_model_have_the_same_server(use, events, reports):
    jobs = [await use() for _ in range(3)]
    assert events == ["start 0"]
    assert reports == [True, False, False]
    assert len({(server.url, server.key, server.log) for (server,) in jobs}) == 1
    ((server,),) = {tuple(servers) for servers in jobs}
    assert server.about == {"num_jobs_before": 2, "logs": str(server.log.parent)}
    assert Path(server.spec.model).name == "run-2"  # what it would be restarted with
    assert server.key not in str(server.about)  # which is recorded


async def test_a_job_of_two_servers_leaves_both_to_the_next(use, events):
    first, second = await use(count=2), await use(count=2)
    assert events == ["start 0", "start 1"]
    assert first == second
    assert len({server.log for server in first}) == 2


@pytest.mark.parametrize("changes", [{"lora_rank": 16}, {"dtype": "bfloat16"}, {"content": "b"}])
async def test_another_need_ends_the_kept_servers_first(use, events, changes):
    await use(count=2)
    await use(**changes)
    # Otherwise the new one would have no memory.
    assert events == ["start 0", "start 1", "stop 0", "stop 1", "start 2"]


async def test_a_server_that_cannot_be_cleared_is_replaced(use, events, clean, reports):
    clean[0] = False
    (server,) = await use()
    assert events == ["start 0", "stop 0"]
    clean[0] = True
    await use()
    assert events == ["start 0", "stop 0", "start 1"]
    assert reports == [True, True]
    assert server.about["num_jobs_before"] == 0


async def test_a_dead_server_is_started_again(use, events):
    (server,) = await use()
    dying = asyncio.create_task(server.died())
    await asyncio.sleep(0)
    server._process.alive = False
    events.append("stop 0")
    assert await asyncio.wait_for(dying, LIMIT_S) == "exit code 9"
    await server.stop()
    await server.start()
    assert events == ["start 0", "stop 0", "start 1"]


async def test_a_server_of_its_own_ends_with_its_run(events, tmp_path):
    server = launch.VllmProcess(spec_of(), CONFIG, Path(), tmp_path / "log")
    await server.start()
    await server.stop()
    assert events == ["start 0", "stop 0"]


def test_a_model_that_a_run_has_written_is_known_by_its_content(tmp_path):
    def digest(weights: bytes, config: bytes = b"{}", *, lora_rank: int) -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config)
        return model_digest(spec_of(tmp_path, lora_rank=lora_rank), written=True)

    assert digest(b"1", lora_rank=8) != digest(b"2", lora_rank=8)
    # The first publish replaces all weights.
    assert digest(b"1", lora_rank=0) == digest(b"2", lora_rank=0)
    assert digest(b"1", lora_rank=0) != digest(b"1", b"[]", lora_rank=0)


def test_a_model_of_a_hub_is_known_by_its_name():
    names = [spec_of("Qwen/Qwen3-0.6B"), spec_of("Qwen/Qwen3-0.6B", revision="abc")]
    assert len({model_digest(each, written=False) for each in names}) == 2


@pytest.fixture
async def server(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    await server.start()
    yield server
    await server.stop()


async def test_a_server_loses_what_a_job_has_left(server):
    server.is_paused = True
    server.values |= {"policy-1": 1.0, "policy-2": 2.0}
    assert await cleared(server.url, "a-key")
    assert server.values == {"base": 0.0}
    assert not server.is_paused
    assert server.calls[-1] == "/reset_prefix_cache"


@pytest.mark.parametrize("fault", ["unhealthy", "rejects", "gone"])
async def test_a_server_that_does_not_answer_is_not_clear(server, fault):
    server.is_healthy = fault != "unhealthy"
    server.resume_status = 500 if fault == "rejects" else 200
    if fault == "gone":
        await server.stop()
    assert not await cleared(server.url, "a-key")
