"""Wait until a program does nothing but wait, so that all calls that it makes at once are here.

Linux tells for each thread whether it runs and how often it has run. A program all of whose threads
sleep, and have not run while everything that it has sent was read, makes no call before it gets an
answer or a clock wakes it. This needs no guess about time, however busy the machine is. Other
systems do not tell this, so nothing is waited for there.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 20.0
LIMIT_CPU_S = 0.5  # A program that still works then may work while it waits.
READ_ROUNDS = 64  # of the event loop, after which all that was sent before is read
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
CAN_TELL = all(
    Path(f"/proc/self/task/{os.getpid()}/{name}").exists() for name in ("schedstat", "children")
)
ASLEEP = frozenset(b"SITtZX")  # the states of threads that do not run and have nothing to run for


@dataclass(frozen=True, slots=True)
class _Threads:
    all_sleep: bool
    num_runs: dict[str, bytes]  # how often each has run, by its number
    cpu_s: dict[str, float]


async def wait_until_settled(guard_pid: int, is_answering: Callable[[], bool]) -> None:
    """Return when a program does nothing but wait for the model, or has worked too long for that.

    guard_pid: the parent of the program's processes.
    is_answering: whether the program also waits for something else here, such as a step.
    """
    if not CAN_TELL:
        return
    begun_s, worked_s, pause_s = time.monotonic(), 0.0, SHORTEST_PAUSE_S
    before = _threads_below(guard_pid)
    while worked_s < LIMIT_CPU_S and time.monotonic() - begun_s < LIMIT_S:
        is_quiet = before.all_sleep and not is_answering()
        if is_quiet:
            for _ in range(READ_ROUNDS):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        now = _threads_below(guard_pid)
        is_quiet = is_quiet and now.all_sleep and not is_answering()
        if is_quiet and now.num_runs == before.num_runs:
            return
        worked_s += sum(
            seconds - before.cpu_s.get(number, 0.0) for number, seconds in now.cpu_s.items()
        )
        before = now


def _threads_below(guard_pid: int) -> _Threads:
    all_sleep, num_runs, cpu_s = True, dict[str, bytes](), dict[str, float]()
    pids = _children(str(guard_pid), str(guard_pid))
    for pid in pids:  # The list grows during the loop.
        for number in _names(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{number}"
            # The name stands in parentheses and may itself contain parentheses.
            state = _read(f"{folder}/stat").rpartition(b")")[2].strip()[:1]
            all_sleep &= not state or state[0] in ASLEEP
            if statistics := _read(f"{folder}/schedstat").split():
                run_ns, _, num_runs[number] = statistics
                cpu_s[number] = int(run_ns) / 1e9
            pids += _children(pid, number)
    return _Threads(all_sleep, num_runs, cpu_s)


def _children(pid: str, thread: str) -> list[str]:
    return _read(f"/proc/{pid}/task/{thread}/children").decode().split()


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - pathlib is slower
    except OSError:
        return []  # The process has ended.


def _read(path: str) -> bytes:
    """Return a file's content; nothing if the thread has ended."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""
