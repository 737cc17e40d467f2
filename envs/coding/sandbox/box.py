"""The server's side of a submission's run: start the child, send it calls, limit it, kill it.

Each request and each answer is one line of JSON:

    {"code", "function", "cpu_s", "memory_mb",
     "root": path of an empty folder}            ->  {"layers": [...]} once confined, and then
                                                     {"loaded": true} or {"error": [class, message]}
    {"calls": [[argument, ...], ...]}            ->  {"results": [{"value"} or {"error"}, ...]}

At any time the child may answer {"violation": what} or {"limit": what} instead. The child never
receives expected results, and it receives a batch of calls only after it has answered the previous
one. Its answers to the first batch (the visible examples) thus cannot contain the hidden arguments;
text from later answers is not passed on to the agent.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .channel import Channel, Gone
from .outcome import (
    LIMIT,
    NOT_LOADED,
    VIOLATION,
    Ended,
    Outcome,
    SandboxError,
    raise_if_last,
    read_error,
    read_results,
)

COMMAND = (sys.executable, "-I", "-S", "-B", "-W", "ignore", str(Path(__file__).parent / "inside"))
# for the children's root folders; the first one is in memory, as a disk may be busy for seconds
ROOTS = (Path("/dev/shm"), Path("/tmp"))
OUT_OF_RESOURCES = ("MemoryError", "RecursionError")
FORBIDDEN_CALL = "a system call that no function needs"
EXIT_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one run. An ordinary solution takes hundredths of a second."""

    cpu_s: int = 1
    wall_s: float = 10.0
    memory_mb: int = 256


DEFAULT_LIMITS = Limits()
# Limits the children that run at once over all sessions; others wait in their sessions' threads.
_places = threading.BoundedSemaphore(
    int(os.environ.get("CODING_MAX_PROCESSES", "0")) or os.cpu_count() or 1
)


def run(
    code: str,
    function: str,
    batches: Sequence[Sequence[list[Any]]],
    limits: Limits = DEFAULT_LIMITS,
) -> Outcome:
    """Load `code` in a child and call `function` with every argument list of every batch.

    Waits until a process may start and has started, then blocks for little more than
    `limits.wall_s`. Raises SandboxError if the child cannot be confined.
    """
    outcome = Outcome()
    with _places:
        child = _start()
        root = _make_root(child.pid)
        request = {"code": code, "function": function, "root": str(root or "")}
        request |= {"cpu_s": limits.cpu_s, "memory_mb": limits.memory_mb}
        try:
            _converse(Channel(child, limits.wall_s), request, batches, outcome)
        except Ended as end:
            outcome.ending, outcome.detail = end.ending, end.detail
        except Gone:
            outcome.ending, outcome.detail = _why_gone(child, outcome)
        finally:
            _stop(child)
            if root is not None:
                with suppress(OSError):  # The child has removed it, unless it was killed before.
                    root.rmdir()
    return outcome


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={},
        start_new_session=True,
    )


def _make_root(pid: int) -> Path | None:
    """Make an empty folder, which a child enters and removes; None if there is room for none."""
    for folder in ROOTS:
        root = folder / f"coding-{pid}-{os.urandom(8).hex()}"
        with suppress(OSError):
            root.mkdir(0o700)
            return root
    return None


def _converse(
    channel: Channel,
    request: dict[str, Any],
    batches: Sequence[Sequence[list[Any]]],
    outcome: Outcome,
) -> None:
    """Exchange requests and answers, and fill in `outcome`. Raises Ended, Gone or SandboxError."""
    channel.send(request)
    answer = channel.receive()
    if "layers" not in answer:
        raise SandboxError(
            f"submissions cannot be run safely on this machine ({answer.get('unavailable')}); "
            "run the environment on Linux or in its container"
        )
    outcome.layers = answer["layers"]
    answer = channel.receive()
    raise_if_last(answer)
    if "error" in answer:
        outcome.error = read_error(answer["error"])
        _raise_if_out_of_resources([outcome.error[0]])
        raise Ended(NOT_LOADED, outcome.error[0])
    for number, calls in enumerate(batches):
        channel.send({"calls": list(calls)})
        answer = channel.receive()
        raise_if_last(answer, is_told=number == 0)
        outcome.results.append(read_results(answer, len(calls)))
        _raise_if_out_of_resources(
            result.error[0] for result in outcome.results[-1] if result.error
        )


def _raise_if_out_of_resources(errors: Iterable[str]) -> None:
    for error in errors:
        if error in OUT_OF_RESOURCES:
            raise Ended(LIMIT, error)


def _why_gone(child: subprocess.Popen[bytes], outcome: Outcome) -> tuple[str, str]:
    """Return ending and detail for a child that closed its pipe without saying why."""
    try:
        status = child.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return VIOLATION, "a closed pipe"
    if not outcome.layers:
        raise SandboxError(f"the sandbox's process ended at its start, with status {status}")
    if status == -signal.SIGSYS:
        return VIOLATION, FORBIDDEN_CALL
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return LIMIT, "time"
    if status < 0:
        return LIMIT, f"a crash by {signal.Signals(-status).name}"
    return VIOLATION, "an exit of the process"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all other processes of its group, and close its pipes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
