"""How adapters are published to a server and removed; a list replaces the server."""

from pathlib import Path

import numpy as np
import pytest

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.publish import AdapterPublisher, Published
from openenv_pipe.engines.vllm.server_command import MAX_ADAPTERS
from openenv_pipe.errors import EngineError

OWNER = Owner.new("a test")


class FakeClient:
    """A client of a server that has these adapters."""

    def __init__(self, *there: str) -> None:
        self.names = list(there)
        self.on_load = lambda name: None
        self.unload_error: Exception | None = None

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.on_load(name)
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
def publisher(tmp_path) -> AdapterPublisher:
    return AdapterPublisher(None, tmp_path, None, OWNER)


def adopted(publisher: AdapterPublisher, version: int) -> Published:
    published = Published(
        name=f"step-{version}", version=version, label="", expected=np.zeros((1, 1))
    )
    publisher.adopt(published)
    return published


async def test_a_restore_gives_all_that_requests_may_ask_for(publisher):
    versions = [adopted(publisher, version) for version in range(3)]
    another = FakeClient("step-0")
    assert await publisher.restore(another) is versions[-1]
    assert another.names == ["step-0", "step-1", "step-2"]
    assert publisher.model(versions[-1]) == "step-2"


async def test_a_restore_ends_with_what_was_adopted_meanwhile(publisher):
    adopted(publisher, 0)
    late = []
    client = FakeClient()
    client.on_load = lambda name: late or late.append(adopted(publisher, 1))
    assert await publisher.restore(client) is late[0]
    assert client.names == ["step-0", "step-1"]


async def test_a_server_that_has_no_version_yet_keeps_the_base(publisher):
    assert await publisher.restore(FakeClient()) is None
    assert publisher.model(None) == BASE


async def test_old_versions_go_from_all_servers_before_their_folders(publisher, tmp_path):
    names = [f"step-{version}" for version in range(MAX_ADAPTERS + 2)]
    for version, name in enumerate(names):
        (tmp_path / name).mkdir()
        adopted(publisher, version)
    clients = [FakeClient(*names), FakeClient(*names)]
    await publisher.retire(clients)
    assert [client.names for client in clients] == [names[2:]] * 2
    assert sorted(folder.name for folder in tmp_path.iterdir()) == names[2:]


async def test_a_folder_stays_while_a_server_may_have_it(publisher, tmp_path):
    for version in range(MAX_ADAPTERS + 1):
        (tmp_path / f"step-{version}").mkdir()
        adopted(publisher, version)
    silent = FakeClient()
    silent.unload_error = ServerGoneError("no answer")
    await publisher.retire([silent, FakeClient("step-0")])
    assert (tmp_path / "step-0").exists()
    silent.unload_error = EngineError("status 500")
    adopted(publisher, 9)
    with pytest.raises(EngineError, match="500"):
        await publisher.retire([silent])


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
    await AdapterPublisher(None, ours, None, OWNER).clear(client)
    assert client.names == ["run-alive-1-step-0", "a-user-s", "elsewhere"]
