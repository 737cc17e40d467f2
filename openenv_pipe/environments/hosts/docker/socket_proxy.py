"""Forward a unix socket in a shared folder to a server in a container without a network.

    python3 -I -S -c SOURCE SOCKET PORT COMMAND...

`container.py` passes this file's text into the container. There the program starts COMMAND, the
image's own command, and forwards every connection to SOCKET to 127.0.0.1:PORT, the container's
loopback. It passes SIGTERM on to COMMAND and exits with COMMAND's exit code (128 + N if signal N
ended it). This file is never imported, and needs only the standard library of Python 3.8 or later.
COMMAND cannot open connections to the outside.
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
    """The end at the socket. Data that arrives before the inner end is open is kept for it."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.early = b""
        self.opening = None  # keeps a reference, so that the task is not garbage collected

    def connection_made(self, transport):
        super().connection_made(transport)
        self.opening = asyncio.ensure_future(self.open_inner_end())

    def data_received(self, data):
        if self.other is None:
            self.early += data
            self.transport.pause_reading()
        else:
            super().data_received(data)

    async def open_inner_end(self):
        loop = asyncio.get_running_loop()
        try:
            _, inner = await loop.create_connection(lambda: End(self), LOOPBACK, self.port)
        except OSError:  # the server does not listen yet, or has ended
            self.transport.close()
            return
        self.other = inner
        inner.transport.write(self.early)
        if self.transport.is_closing():
            inner.transport.close()
        else:
            self.transport.resume_reading()


async def main(path, port, command):
    """Run the command and forward connections to it. Return the exit code."""
    try:
        server = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return CANNOT_START
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.terminate)
    listener = await loop.create_unix_server(lambda: Outside(port), path, backlog=4096)
    os.chmod(path, 0o666)  # noqa: PTH101 - the folder's permissions control access
    code = await server.wait()
    listener.close()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
