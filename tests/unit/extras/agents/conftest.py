"""What the tests of agents' servers leave out, as it takes several times as long as the rest."""

from types import SimpleNamespace

import pytest

from openenv_pipe.extras.agents.clients import player
from openenv_pipe.extras.agents.http import endpoint


@pytest.fixture(autouse=True)
def _quick_servers(monkeypatch):
    """A server that begins looks for garbage in all that the process has imported. One of clients
    that ends waits for those that may still ask for an episode."""
    idle = SimpleNamespace(collect=int, freeze=int, unfreeze=int)
    monkeypatch.setattr(endpoint, "gc", idle)
    monkeypatch.setattr(player, "LAST_WORD_S", 0.0)
