"""Exchange lines of JSON with a child, limited in time and size whatever the child does."""

import json
import os
import select
import subprocess
import time
from typing import Any

from .outcome import LIMIT, Ended, garbled

MAX_ANSWER_BYTES = 1_000_000


class Gone(Exception):  # noqa: N818 - an outcome, not an error of the server
    """The child closed its end of the pipes."""


class Channel:
    """The two pipes of a child, with one deadline for the whole conversation."""

    def __init__(self, child: subprocess.Popen[bytes], wall_s: float) -> None:
        assert child.stdin is not None and child.stdout is not None
        self._requests, self._answers = child.stdin.fileno(), child.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._deadline_s = time.monotonic() + wall_s
        self._unread = bytearray()

    def send(self, request: dict[str, Any]) -> None:
        """Write a request. Raises Ended at the deadline, Gone if the child closed its end."""
        data = json.dumps(request).encode() + b"\n"
        while data:
            self._wait(self._requests, select.POLLOUT)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise Gone from None

    def receive(self) -> dict[str, Any]:
        """Read an answer. Raises Ended at a limit or for a malformed answer, else Gone."""
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_ANSWER_BYTES:
                raise Ended(LIMIT, "output")
            self._wait(self._answers, select.POLLIN)
            part = os.read(self._answers, 65536)
            if not part:
                raise Gone
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise garbled() from None
        if type(answer) is not dict:
            raise garbled()
        return answer

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise Ended(LIMIT, "time")
