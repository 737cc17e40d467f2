"""Join a Ray cluster by its address, in bounded time and with errors in words."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openenv_pipe.errors import HostError

CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # how often Ray tries to join a cluster


def join(ray: Any, address: str) -> None:
    """Connect this process. address: host:port, or auto. Raises HostError."""
    named = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    host, _, port = named.rpartition(":")
    is_known = "://" not in named and port.isdigit()
    if is_known and not answers(host.strip("[]"), int(port)):
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


def answers(host: str, port: int) -> bool:
    """Return whether a TCP port accepts connections."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
