"""The connection to a Ray cluster, made and ended in bounded time, with readable errors.

Ray is an optional package (the extra `ray`), which is imported when a connection is opened.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.system.optional_packages import how_to_install

CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # how often Ray tries to join a cluster
SHUTDOWN_LIMIT_S = 15.0
HEAD_CHECK_S = 3.0
NUM_FAILED_CHECKS = 3  # after which the head counts as lost
# When a process ends, Ray would kill its direct children only. These are the guardians of
# `process.py`, which end whole trees as soon as their parent is gone, and so must survive it.
SPARES_GUARDIANS = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
_log = logging.getLogger(__name__)
_connecting = threading.Lock()
_users: "list[RayConnection]" = []  # of the process's one connection, if this module has opened it


def require_ray() -> None:
    """Check that ray is installed, without the seconds of its import. Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"cluster=ray needs the package ray; {how_to_install('ray')}")


class RayConnection:
    """A connection to a running cluster.

    All instances in a process share one connection of Ray's. Whatever was placed ends when the last
    instance is closed, or this process is gone.
    """

    def __init__(self, address: str) -> None:
        """address: host:port, or auto. Blocks for some seconds. Raises HostError, ConfigError."""
        require_ray()
        import ray

        self.ray = ray
        with _connecting:
            is_open = ray.is_initialized()
            if not is_open:
                # In the main thread, Ray would replace the handler of SIGTERM.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(join, ray, address).result()
            if _users or not is_open:
                _users.append(self)
        self.head: str = ray.get_runtime_context().gcs_address

    def head_answers(self) -> bool:
        """Return whether the cluster's head still accepts connections."""
        host, _, port = self.head.rpartition(":")
        return _answers(host.strip("[]"), int(port))

    def head_lost(self, what: str) -> HostError:
        """Return the error about a lost head. what: the thing to resume, in words."""
        return HostError(
            f"the head of the Ray cluster at {self.head} does not answer any more; without it no "
            "process can be placed or replaced. Start the cluster again (`ray start --head`), "
            f"then resume the {what}"
        )

    def close(self) -> None:
        """End the connection, if no other uses it, in bounded time. Repeating it does no harm."""
        with _connecting:
            if self not in _users:
                return
            _users.remove(self)
            if not _users:  # with the lock, or another would take the connection that ends
                call_in_bounded_time(self.ray.shutdown)


def call_in_bounded_time(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function of Ray's, which may wait forever where the cluster's head is lost.

    It runs in a daemon thread, which does not keep this process alive; its errors are only logged.
    """

    def call() -> None:
        try:
            function(*arguments)
        except Exception as error:
            _log.debug("while a connection to Ray ended: %s", error)

    calling = threading.Thread(target=call, daemon=True, name="ray's end")
    calling.start()
    calling.join(SHUTDOWN_LIMIT_S)


def in_a_line(error: Exception) -> str:
    """Return the beginning of one of Ray's errors, which have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def join(ray: Any, address: str) -> None:
    """Connect this process. address: host:port, or auto. Raises HostError."""
    named = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    host, _, port = named.rpartition(":")
    is_known = "://" not in named and port.isdigit()
    if is_known and not _answers(host.strip("[]"), int(port)):
        given = "" if named == address else f", by RAY_ADDRESS={named}"
        raise HostError(
            f"cluster.address={address}{given}: no Ray cluster answers there; start one with "
            "`ray start --head`, or set cluster.address to the address that it prints"
        )
    try:
        with _one_attempt():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HostError(
            f"cluster.address={address}: cannot join the Ray cluster: {error}; start one with "
            "`ray start --head`, with the same versions of ray and Python on all nodes"
        ) from error


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Let Ray try to join a cluster once, for 40 seconds, where its default is 14 minutes."""
    had = ATTEMPTS in os.environ
    os.environ.setdefault(ATTEMPTS, "1")
    try:
        yield
    finally:
        if not had:
            del os.environ[ATTEMPTS]


def _answers(host: str, port: int) -> bool:
    """Return whether a TCP port accepts connections."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
