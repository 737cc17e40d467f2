"""Ports for servers that start later, or twice. The system gives none of these to connections."""

import itertools
import os

from openenv_pipe.system.process import port_in_use

FIRST, NUM_PORTS = 10_000, 20_000  # below those that Linux gives to connections, from 32768 on
_numbers = itertools.count(os.getpid() * 97)  # two suites at a time take others


def lasting_port(count: int = 1) -> int:
    """The first of `count` free ports in a row; nobody is given it twice."""
    while True:
        ports = [FIRST + next(_numbers) % NUM_PORTS for _ in range(count)]
        if ports[0] + count - 1 == ports[-1] and not any(map(port_in_use, ports)):
            return ports[0]
