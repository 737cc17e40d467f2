"""How adapters get to a server, with a list in its place."""

from pathlib import Path

from openenv_pipe.engines.vllm.publish import AdapterPublisher, Published
from openenv_pipe.errors import EngineError


class FakeClient:
    """A server that has some adapters, and says what the publisher was at when it got each."""

    def __init__(self, publisher: AdapterPublisher, *there: str) -> None:
        self.names = list(there)
        self.seen: list[tuple[str, int]] = []
        self._publisher = publisher

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.seen.append((self._publisher.model, self._publisher.version))
        if name in self.names:
            raise EngineError(f"The lora adapter '{name}' has already been loaded.")
        self.names.append(name)


def adopted(publisher: AdapterPublisher, version: int) -> Published:
    published = Published(name=f"step-{version}", version=version, folder=Path(f"/w/{version}"))
    publisher.adopt(published)
    return published


async def test_turns_that_begin_during_a_restore_are_not_of_an_old_version():
    publisher = AdapterPublisher(None, Path("/w"), None)
    first = FakeClient(publisher)
    for version in range(3):
        await publisher.send(first, adopted(publisher, version))
    another = FakeClient(publisher, "step-0")
    await publisher.restore(another)
    assert another.names == ["step-0", "step-1", "step-2"]
    assert another.seen == [("step-2", 2)] * 3
    assert (publisher.model, publisher.version) == ("step-2", 2)


async def test_a_restore_gives_what_a_dead_server_did_not_get():
    publisher = AdapterPublisher(None, Path("/w"), None)
    await publisher.send(FakeClient(publisher), adopted(publisher, 0))
    adopted(publisher, 1)  # and the server died of what came next
    another = FakeClient(publisher)
    await publisher.restore(another)
    assert another.names == ["step-0", "step-1"]
    assert (publisher.model, publisher.version) == ("step-1", 1)


async def test_a_server_that_has_no_version_yet_keeps_the_base():
    publisher = AdapterPublisher(None, Path("/w"), None)
    await publisher.restore(FakeClient(publisher))
    assert (publisher.model, publisher.version) == ("base", 0)
