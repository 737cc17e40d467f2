"""Connections to a Ray cluster, whose functions are fakes or reach nothing."""

import os
import threading
import types

import pytest

from openenv_pipe.errors import HostError
from openenv_pipe.system import ray_connection as module
from openenv_pipe.system.ray_connection import ATTEMPTS, RayConnection, join
from tests.ports import lasting_port

ray = pytest.importorskip("ray")
LIMIT_S = 30.0


class FakeRay:
    """Connects and ends when it is allowed to."""

    def __init__(self) -> None:
        self.is_open = False
        self.num_ended = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_waiting = threading.Event()

    def is_initialized(self):
        return self.is_open

    def init(self, **_):
        self._wait()
        self.is_open = True

    def shutdown(self):
        self._wait()
        self.is_open = False
        self.num_ended += 1

    def get_runtime_context(self):
        return types.SimpleNamespace(gcs_address="127.0.0.1:1")

    def _wait(self):
        self.is_waiting.set()
        assert self.may_go_on.wait(LIMIT_S)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeRay()
    for name in ("is_initialized", "init", "shutdown", "get_runtime_context"):
        monkeypatch.setattr(ray, name, getattr(fake, name))
    monkeypatch.setattr(module, "_users", [])
    return fake


def test_a_connection_that_is_made_while_another_one_ends_stays_open(fake):
    first = RayConnection("auto")
    fake.may_go_on.clear()
    fake.is_waiting.clear()
    ending = threading.Thread(target=first.close)
    ending.start()
    assert fake.is_waiting.wait(LIMIT_S)
    made = []
    making = threading.Thread(target=lambda: made.append(RayConnection("auto")))
    making.start()
    fake.may_go_on.set()
    for thread in (ending, making):
        thread.join(LIMIT_S)
    assert fake.is_open
    assert module._users == made


@pytest.mark.parametrize("is_variable", [False, True])
def test_an_address_where_nothing_answers_is_rejected_before_ray_tries(monkeypatch, is_variable):
    address = f"127.0.0.1:{lasting_port()}"
    if is_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    never = types.SimpleNamespace(init=lambda **_: pytest.fail("Ray tries for minutes"))
    with pytest.raises(HostError, match="no Ray cluster answers") as raised:
        join(never, "auto" if is_variable else address)
    assert address in str(raised.value)


def test_ray_tries_once_to_join_what_is_no_cluster(monkeypatch):
    monkeypatch.delenv(ATTEMPTS, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tried = []

    def init(**_):
        tried.append(os.environ.get(ATTEMPTS))
        raise ConnectionError("no")

    with pytest.raises(HostError, match="cannot join the Ray cluster: no"):
        join(types.SimpleNamespace(init=init), "auto")
    assert tried == ["1"]
    assert ATTEMPTS not in os.environ
