"""Scoring functions in processes of their own, whose time is limited by ending them.

A worker reads rows and writes scores as lines of JSON: `python worker.py FOLDER MODULE:FUNCTION`.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

START_LIMIT_S = 25.0  # for importing the function's module

_log = logging.getLogger(__name__)


class ScoreError(RuntimeError):
    """A scoring function that cannot be used, or that has failed."""


class Workers:
    """As many processes as there are processors, each started when it is needed."""

    def __init__(self, target: str, folder: str, limit_s: float) -> None:
        self._target = target
        self._folder = folder
        self._limit_s = limit_s
        self._free = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._idle: deque[_Worker] = deque()
        self._was_started = False
        weakref.finalize(self, _end_all, self._idle)  # also when the server ends

    def start(self) -> None:
        """Start a worker unless one has been. Raises ScoreError if the function is not found."""
        if not self._was_started:
            with self._free:
                self._idle.append(self._take())
            self._was_started = True

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """Return the function's score, or 0.0 if it takes longer than the limit.

        Raises ScoreError if the function raises an exception, or returns no number.
        """
        with self._free:
            worker = self._take()
            try:
                told = worker.ask([answer, row], self._limit_s)
            except TimeoutError:
                worker.end()
                late = "%s took longer than %g s, so the answer %.200r earns 0"
                _log.warning(late, self._target, self._limit_s, answer)
                return 0.0
            if "score" in told:
                self._idle.append(worker)
                return told["score"]
            worker.end()
        raise ScoreError(f"{self._target} failed on {answer!r:.200}: {told['error']}")

    def _take(self) -> "_Worker":
        with suppress(IndexError):
            return self._idle.pop()
        worker = _Worker(self._folder, self._target)
        try:
            told = worker.told(START_LIMIT_S)
        except TimeoutError:
            told = {"error": f"its module was not imported within {START_LIMIT_S:g} s"}
        if "error" in told:
            worker.end()
            raise ScoreError(f"QUESTIONS_SCORE={self._target!r} cannot be used: {told['error']}")
        return worker


def _end_all(workers: "deque[_Worker]") -> None:
    for worker in workers:
        worker.end()


class _Worker:
    """One process, which scores one answer at a time."""

    def __init__(self, folder: str, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), folder, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )

    def ask(self, question: Any, limit_s: float) -> dict[str, Any]:
        """Return what the worker writes about an answer. Raises TimeoutError."""
        with suppress(BrokenPipeError):  # It has died, as its output says.
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        return self.told(limit_s)

    def told(self, limit_s: float) -> dict[str, Any]:
        """Return the next line of the worker. Raises TimeoutError."""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            raise TimeoutError
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process ended"}

    def end(self) -> None:
        """End the process, and those that its function has started, which may hold its pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
