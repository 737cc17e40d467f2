"""Exchange lines of JSON with a child, limited in time and size whatever the child does."""

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from .outcome import LIMIT, Ended, SandboxError, garbled

START_LIMIT_S = 45.0  # until the child is confined, in hundredths of a second on an idle machine
MAX_ANSWER_BYTES = 1_000_000
# A function that computes never sleeps. One that does would keep its place from other sessions'
# programs until the deadline, and make their steps exceed the client's time limit.
LOOK_S = 0.25
MAX_LOOKS_ASLEEP = 4


class Gone(Exception):  # noqa: N818 - an outcome, not an error of the server
    """The child closed its end of the pipes."""


class Channel:
    """The two pipes of a child, with a deadline for its start and one for the rest.

    What the machine needs for the start is not the submission's fault, so it has its own limit.
    """

    def __init__(self, child: subprocess.Popen[bytes], wall_s: float) -> None:
        assert child.stdin is not None and child.stdout is not None
        self._requests, self._answers = child.stdin.fileno(), child.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._status = Path(f"/proc/{child.pid}/stat")
        self._wall_s = wall_s
        self._deadline_s = time.monotonic() + START_LIMIT_S
        self._unread = bytearray()
        self._is_confined = False  # as the first answer says; before it, Python starts

    def send(self, request: dict[str, Any]) -> None:
        """Write a request. Raises Ended at the deadline, Gone if the child closed its end.

        Raises SandboxError if the child is not confined in time.
        """
        data = json.dumps(request).encode() + b"\n"
        while data:
            self._wait(self._requests, select.POLLOUT)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise Gone from None

    def receive(self) -> dict[str, Any]:
        """Read an answer. Raises Ended at a limit or for a malformed answer, else as `send`."""
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
        if not self._is_confined:
            self._is_confined = True
            self._deadline_s = time.monotonic() + self._wall_s
        return answer

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        num_asleep = 0
        while num_asleep < MAX_LOOKS_ASLEEP:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0 and not self._is_confined:
                raise SandboxError(f"the sandbox did not start within {START_LIMIT_S:g} seconds")
            if left_s <= 0:
                raise Ended(LIMIT, "time")
            if poll.poll(min(left_s, LOOK_S) * 1000):
                return
            num_asleep = num_asleep + 1 if self._is_confined and self._is_asleep() else 0
        raise Ended(LIMIT, "waiting instead of computing")

    def _is_asleep(self) -> bool:
        """Return whether the child waits for something other than a processor or a disk."""
        try:
            return self._status.read_text().rpartition(")")[2].split()[0] == "S"
        except OSError:  # The child has ended, or this is not Linux.
            return False
