"""What the tests of agents' servers leave out."""

from types import SimpleNamespace

import pytest

from openenv_pipe.extras.agents.http import endpoint


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """A server that begins looks for garbage in all that the process has imported: in a test, that
    takes several times as long as the rest of it."""
    idle = SimpleNamespace(collect=int, freeze=int, unfreeze=int)
    monkeypatch.setattr(endpoint, "gc", idle)
