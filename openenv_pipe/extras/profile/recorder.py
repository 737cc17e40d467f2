"""Records at regular moments what all threads of this process do, and what its coroutines wait for.

A moment is one look at `sys._current_frames()` and at the tasks of the event loop, while no other
Python code runs. Profilers such as py-spy do not see what coroutines wait for.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import openenv_pipe
from openenv_pipe.registry import block_types

PACKAGE = f"{Path(openenv_pipe.__file__).parent}/"
SAMPLING, ENVIRONMENT, REWARDS = "sampling", "environment", "rewards"
UPDATE, PUBLISHING, CHECKPOINT = "update", "publishing", "checkpoint"
FILES, PYTHON = "files", "python"
MEANINGS = {
    SAMPLING: "the engine computes tokens, or a server of it is waited for",
    ENVIRONMENT: "an episode waits for its environment's server",
    REWARDS: "rewards are computed, or a judge or verifier is waited for",
    UPDATE: "the learner computes gradients and the optimizer's step",
    PUBLISHING: "new weights are given to the engine",
    CHECKPOINT: "a checkpoint is saved",
    FILES: "episodes and metrics are written",
    PYTHON: "other Python code: adapters, templates, advantages, the event loop",
}
INTERVAL_S = 0.01
Stack = tuple[CodeType, ...]  # the outermost frame first


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Gives `label` to frames of the files below `path` whose function begins with `function`."""

    label: str
    path: str  # in the package
    function: str = ""

    def fits(self, path: str, function: str) -> bool:
        return path.startswith(self.path) and function.startswith(self.function)


def _reward_rules() -> list[FrameRule]:
    """Return rules for the folders that have terms of rewards, those of extras included."""
    modules = (each.build.partition(":")[0] for each in block_types("reward.terms").values())
    folders = {module.rpartition(".")[0].partition(".")[2] for module in modules}
    return [FrameRule(REWARDS, f"{folder.replace('.', '/')}/") for folder in sorted(folders)]


# Of threads: what they compute. A thread that waits has no label.
THREAD_RULES = (
    FrameRule(SAMPLING, "engines/episode_batch.py", "EpisodeBatch.generate"),
    FrameRule(UPDATE, "learner/learner.py", "Learner.update"),
    FrameRule(UPDATE, "learner/parallel_batches.py"),
    FrameRule(UPDATE, "", "LearnerGroup.update"),  # on several devices, of the extra that has them
    FrameRule(CHECKPOINT, "pipeline/checkpoints.py"),
    FrameRule(PUBLISHING, "models/policy.py", "Policy.follow"),
    FrameRule(PUBLISHING, "", "MemoryTransfer."),  # without files, of the extra that has it
    FrameRule(PUBLISHING, "models/weights.py"),
    *_reward_rules(),
    FrameRule(FILES, "runs/"),
    FrameRule(FILES, "pipeline/grpo_stage.py", "_run_hooks"),
)
# Of coroutines: what they wait for, beyond this process or in another of its tasks.
COROUTINE_RULES = (
    FrameRule(PUBLISHING, "pipeline/group_sources.py", "PlayedGroups.publish"),
    FrameRule(ENVIRONMENT, "environments/client/session.py"),
    *_reward_rules(),
    FrameRule(SAMPLING, "engines/vllm/"),
)
# The innermost frame of a thread that waits for work or for an event.
IDLE = (
    *(("selectors.py", "select"), ("threading.py", "wait"), ("thread.py", "_worker")),
    *(("threading.py", "_wait_for_tstate_lock"), ("queue.py", "get"), ("connection.py", "wait")),
)


def is_idle(stack: Sequence[CodeType]) -> bool:
    """Return whether a thread with this stack waits for work or for an event."""
    leaf = stack[-1]
    return any(
        leaf.co_filename.endswith(f"/{file}") and leaf.co_name == name for file, name in IDLE
    )


def find_label(stack: Iterable[CodeType], rules: Sequence[FrameRule]) -> str | None:
    """Return the label of the first rule that a frame meets, from the outermost frame on."""
    for code in stack:
        if not code.co_filename.startswith(PACKAGE):
            continue
        path = code.co_filename.removeprefix(PACKAGE)
        for rule in rules:
            if rule.fits(path, code.co_qualname):
                return rule.label
    return None


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float  # of time.perf_counter
    working: dict[str, str]  # labels of what threads compute, by the thread's name
    waited_for: frozenset[str]  # labels of what coroutines wait for

    @property
    def labels(self) -> frozenset[str]:
        return self.waited_for | {*self.working.values()}


class Recorder:
    """A thread that records moments between `start` and `stop`."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.moments: list[Moment] = []
        self.ended_s = 0.0  # of time.perf_counter: when the last moment ended
        self._interval_s = interval_s
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # Labels by the ids of a stack's code objects, which are quicker to compare. The stack is
        # kept, so that no other code object gets one of these ids.
        self._thread_labels: dict[tuple[int, ...], tuple[str | None, Stack]] = {}
        self._waiting_labels: dict[tuple[int, ...], tuple[str | None, Stack]] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to record. loop: the event loop whose tasks are looked at."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._record, args=[loop], name="profile")
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _record(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._is_stopped.wait(self._interval_s):
            self.moments.append(
                Moment(
                    at_s=time.perf_counter(),
                    working=self._working(),
                    waited_for=self._waited_for(loop),
                )
            )
        self.ended_s = time.perf_counter()

    def _working(self) -> dict[str, str]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        own = threading.get_ident()
        working = {}
        for ident, frame in sys._current_frames().items():
            if ident == own or ident not in names:
                continue
            stack = _stack(frame)
            key = tuple(map(id, stack))
            if key not in self._thread_labels:
                label = find_label(stack, THREAD_RULES) or PYTHON
                self._thread_labels[key] = (None if is_idle(stack) else label, stack)
            found, _ = self._thread_labels[key]
            if found is not None:
                working[names[ident]] = found
        return working

    def _waited_for(self, loop: asyncio.AbstractEventLoop) -> frozenset[str]:
        found = set()
        for task in asyncio.all_tasks(loop):
            codes = _awaited(task.get_coro())
            key = tuple(map(id, codes))
            if key not in self._waiting_labels:
                self._waiting_labels[key] = (find_label(codes, COROUTINE_RULES), codes)
            found.add(self._waiting_labels[key][0])
        return frozenset(label for label in found if label is not None)


def _stack(frame: FrameType | None) -> Stack:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(codes))


def _awaited(coroutine: Any) -> Stack:
    """Return the code of a coroutine, of the one that it awaits, and so on."""
    codes = []
    while (code := getattr(coroutine, "cr_code", None)) is not None:
        codes.append(code)
        coroutine = coroutine.cr_await
    return tuple(codes)
