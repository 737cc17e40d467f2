"""Forward connections into or out of a container without a network, by a unix socket.

    python3 -I -S -c SOURCE FROM TO COMMAND...

`host.py` and `sandbox.py` pass this file's text into the container. There the program starts
COMMAND, and forwards to TO what connects to FROM. One of them is the path of a socket in a folder
that the container shares with the host, the other a port of 127.0.0.1, the container's loopback: an
environment's server is reached from the socket, and a program reaches the socket from the port.
This program passes SIGTERM on to COMMAND and exits with COMMAND's exit code (128 + N if signal N
ended it). This file is never imported, and needs only the standard library of Python 3.8 or later.
COMMAND cannot open other connections to the outside.
"""

import asyncio
import os
import signal
import sys

LOOPBACK = "127.0.0.1"
CANNOT_START = 127


class End(asyncio.Protocol):
    """One end of a connection, which writes what it receives to the other end."""

    def __init__(self, other=None):
        self.other = other
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.other.transport.write(data)

    def connection_lost(self, error):
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def pause_writing(self):
        self.other.transport.pause_reading()

    def resume_writing(self):
        self.other.transport.resume_reading()


class Outside(End):
    """The end that a client connected to. It keeps data that arrives before the other is open."""

    def __init__(self, target):
        super().__init__()
        self.target = target
        self.early = b""
        self.opening = None  # keeps a reference, so that the task is not garbage collected

    def connection_made(self, transport):
        super().connection_made(transport)
        self.opening = asyncio.ensure_future(self.open_other_end())

    def data_received(self, data):
        if self.other is None:
            self.early += data
            self.transport.pause_reading()
        else:
            super().data_received(data)

    async def open_other_end(self):
        loop = asyncio.get_running_loop()
        try:
            if self.target.isdigit():
                opening = loop.create_connection(lambda: End(self), LOOPBACK, int(self.target))
            else:
                opening = loop.create_unix_connection(lambda: End(self), self.target)
            _, other = await opening
        except OSError:  # the server does not listen yet, or has ended
            self.transport.close()
            return
        self.other = other
        other.transport.write(self.early)
        if self.transport.is_closing():
            other.transport.close()
        else:
            self.transport.resume_reading()


async def main(source, target, command):
    """Run the command and forward connections. Return the exit code."""
    loop = asyncio.get_running_loop()
    if source.isdigit():
        listener = await loop.create_server(
            lambda: Outside(target), LOOPBACK, int(source), backlog=4096
        )
    else:
        listener = await loop.create_unix_server(lambda: Outside(target), source, backlog=4096)
        os.chmod(source, 0o666)  # noqa: PTH101 - the folder's permissions control access
    try:
        server = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return CANNOT_START
    loop.add_signal_handler(signal.SIGTERM, server.terminate)
    code = await server.wait()
    listener.close()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:])))
