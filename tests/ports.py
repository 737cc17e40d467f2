"""Ports for servers that start later or restart on the same port.

They lie outside the range from which the system takes ports for connections.
"""

import itertools
import os

from openenv_pipe.system.process import port_in_use

FIRST, NUM_PORTS = 10_000, 20_000  # Linux takes ports for connections from 32768 on
# test processes that run at the same time begin at different ports
_numbers = itertools.count(os.getpid() * 97)


def lasting_port(count: int = 1) -> int:
    """Return the first of `count` free consecutive ports. No port is returned twice."""
    while True:
        ports = [FIRST + next(_numbers) % NUM_PORTS for _ in range(count)]
        if ports[0] + count - 1 == ports[-1] and not any(map(port_in_use, ports)):
            return ports[0]
