"""What servers receive; how adapters are published and removed. A list replaces the server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.config.precision import publish_mode
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.server_command import MAX_ADAPTERS
from openenv_pipe.engines.vllm.transfer import AdapterFiles, PolicyVersion
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import EngineError

OWNER = Owner.new("a test")


class FakeClient:
    """A client of a server that has these adapters."""

    def __init__(self, *there: str) -> None:
        self.names = list(there)
        self.unload_error: Exception | None = None

    async def load_adapter(self, name: str, folder: Path) -> None:
        if name in self.names:
            raise EngineError(f"The lora adapter '{name}' has already been loaded.")
        self.names.append(name)

    async def has_adapter(self, name: str, folder: Path) -> bool:
        return name in self.names

    async def unload_adapter(self, name: str) -> None:
        if self.unload_error is not None:
            raise self.unload_error
        self.names.remove(name)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def versions(tmp_path, executor) -> Versions:
    return Versions(AdapterFiles(lambda folder: None, tmp_path, executor), OWNER, "run")


def name_of(step: int) -> str:
    return f"run-{step + 1}-step-{step}"


async def adopted(versions: Versions, *steps: int) -> list[PolicyVersion]:
    return [await versions.adopt(step, np.zeros((1, 1))) for step in steps]


async def test_a_restore_gives_all_that_requests_may_ask_for(versions):
    known = await adopted(versions, 0, 1, 2)
    another = FakeClient(name_of(0))
    assert await versions.restore(another) is known[-1]
    assert another.names == [name_of(0), name_of(1), name_of(2)]
    assert known[-1].model == name_of(2)


async def test_a_restore_ends_with_what_was_adopted_meanwhile(versions):
    await adopted(versions, 0)
    late = []
    client = FakeClient()

    async def load_adapter(name: str, folder: Path) -> None:
        client.names.append(name)
        if not late:
            late.extend(await adopted(versions, 1))

    client.load_adapter = load_adapter
    assert await versions.restore(client) is late[0]
    assert client.names == [name_of(0), name_of(0), name_of(1)]


async def test_a_version_that_is_retired_during_a_restore_is_not_missed(versions):
    """Its file is gone when the server wants to read it."""
    await adopted(versions, *range(MAX_ADAPTERS))
    client = FakeClient()

    async def load_adapter(name: str, folder: Path) -> None:
        if name == name_of(0):
            await adopted(versions, MAX_ADAPTERS)
            await versions.retire([])
            raise EngineError("no such file")
        client.names.append(name)

    client.load_adapter = load_adapter
    assert await versions.restore(client) is versions.latest
    assert client.names[-1] == name_of(MAX_ADAPTERS)


async def test_a_version_that_a_server_rejects_ends_its_restore(versions):
    await adopted(versions, 0)
    client = FakeClient()

    async def load_adapter(name: str, folder: Path) -> None:
        raise EngineError("status 500")

    client.load_adapter = load_adapter
    with pytest.raises(EngineError, match="500"):
        await versions.restore(client)


async def test_a_server_that_has_no_version_yet_keeps_the_base(versions):
    assert await versions.restore(FakeClient()) is None


async def test_old_versions_go_from_all_servers_before_their_folders(versions, tmp_path):
    names = [name_of(step) for step in range(MAX_ADAPTERS + 2)]
    await adopted(versions, *range(MAX_ADAPTERS + 2))
    clients = [FakeClient(*names), FakeClient(*names)]
    await versions.retire(clients)
    assert [client.names for client in clients] == [names[2:]] * 2
    assert sorted(folder.name for folder in tmp_path.iterdir()) == names[2:]


async def test_a_folder_stays_while_a_server_may_have_it(versions, tmp_path):
    await adopted(versions, *range(MAX_ADAPTERS + 1))
    silent = FakeClient()
    silent.unload_error = ServerGoneError("no answer")
    await versions.retire([silent, FakeClient(name_of(0))])
    assert (tmp_path / name_of(0)).exists()
    silent.unload_error = EngineError("status 500")
    await adopted(versions, 9)
    with pytest.raises(EngineError, match="500"):
        await versions.retire([silent])


async def test_only_what_dead_runs_have_left_is_taken_from_a_server(tmp_path):
    """A dead run's folder is gone or removed by the next run; living runs keep their adapters."""
    ours, alive = tmp_path / "run-ours", tmp_path / "run-alive"
    (alive / "run-alive-1-step-0").mkdir(parents=True)
    there = {
        "run-dead-1-step-0": tmp_path / "run-dead" / "run-dead-1-step-0",
        "run-dead-probe-0": tmp_path / "run-dead" / "probe",
        "run-alive-1-step-0": alive / "run-alive-1-step-0",
        "a-user-s": tmp_path / "run-dead" / "a-user-s",
        "elsewhere": Path("/nowhere/elsewhere/elsewhere"),
    }
    client = FakeClient(*there)

    async def adapters() -> dict[str, Path]:
        return there

    client.adapters = adapters
    await AdapterFiles(None, ours, None).clear(client)
    assert client.names == ["run-alive-1-step-0", "a-user-s", "elsewhere"]


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (("model.lora.rank=0",), "full"),
        (("model.lora.rank=4",), "merged"),
        (("model.lora.rank=4", "engine.dtype=bfloat16"), "adapter"),
        (("model.lora.rank=4", "model.dtype=bfloat16", "engine.dtype=float32"), "adapter"),
        (("model.lora.rank=4", "model.autocast=bfloat16", "engine.dtype=float32"), "merged"),
        (("model.lora.rank=4", "engine.launch=attach", "engine.url=http://127.0.0.1:1"), "adapter"),
        (("model.lora.rank=4", "device=cuda"), "adapter"),
        (("model.lora.rank=4", "engine.publish=adapter"), "adapter"),
    ],
)
def test_adapters_are_merged_where_vllm_is_slow_with_them_and_it_is_exact(overrides, mode):
    defaults = ("device=cpu", "model.autocast=float32")
    config = compose(["conf=smoke", "engine=vllm", *defaults, *overrides]).config
    assert publish_mode(config) == mode


def test_an_engine_without_servers_publishes_nothing():
    assert publish_mode(compose(["conf=smoke"]).config) is None
