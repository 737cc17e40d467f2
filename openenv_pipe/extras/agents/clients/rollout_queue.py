"""Where clients open episodes, and where they report how these have ended.

POST  /rollouts            open one; the answer stays open, which shows when its client is gone
POST  /rollouts/KEY/end    report a reward, ask for judging, or report a failure
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openenv_pipe.extras.agents.http.gate import PARSED, error_response
from openenv_pipe.extras.agents.schema import ClientAgentConfig
from openenv_pipe.extras.agents.steps import EnvironmentSteps
from openenv_pipe.rollout.context import EpisodeSpec
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.system.user_numbers import MAX_REWARD
from openenv_pipe.types import Episode, Task

CLIENT_SPLIT = "client"  # of the tasks that clients bring
POLL_S = 0.05  # between two checks for an episode
MAX_WAIT_S = 30.0  # for one, in one request
RETRY_AFTER_S = 1  # what a client that found none is told
KEEP_ALIVE_S = 10.0  # between the bytes that keep an answer open through proxies
MAX_METRICS = 64
STALL_S = 30.0  # without a client that plays; then unfinished groups are logged
MAX_STALLED = 4  # groups that a message names
MAX_TASK_LENGTH = 80  # characters of a task in a message
HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # of nginx: pass on what there is
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    reward: float | None = None  # None: the run's own terms decide
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None  # why the client could not play to the end


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRollout:
    key: str
    task: Mapping[str, Any]  # for the client
    steps: EnvironmentSteps


@dataclass(eq=False, kw_only=True, slots=True)
class QueuedEpisode:
    """An episode that waits for a client, and what becomes of it."""

    spec: EpisodeSpec
    task: Task  # of the run, or that of a client
    is_claimed: bool = False
    is_late: bool = False  # the time of its group is over
    is_lost: bool = False  # its client is gone
    episode: Episode | None = None  # at its end
    rollout: OpenRollout | None = None
    report: Report | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool], look_s: float | None = None) -> None:
        """Wait until the condition holds.

        look_s: between two checks; None: the condition depends on this episode alone.
        """
        while not condition():
            try:
                await asyncio.wait_for(self._changed.wait(), look_s)
            except TimeoutError:
                continue

    def change(self, **values: Any) -> None:
        """Set attributes, and wake those who wait for a condition."""
        for name, value in values.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(kw_only=True, slots=True)
class _GroupState:
    own: str | None  # a digest of the client's own task; None: the task is the run's
    task: Task
    timer: asyncio.TimerHandle
    num_left: int  # episodes that are not over
    is_late: bool = False  # its time is over


class RolloutQueue:
    """Hands out the queued episodes to the clients that ask for one, in order."""

    def __init__(self, config: ClientAgentConfig, run: str, *, needs_reward: bool) -> None:
        """
        run: the run's id, from which clients learn that another run now has the address.
        needs_reward: no reward term replaces what clients report, so they have to report it.
        """
        self.run = run
        self._config = config
        self._needs_reward = needs_reward
        self._queued: list[QueuedEpisode] = []
        self._groups: dict[str, _GroupState] = {}
        self._num_moves = 0  # episodes that were opened or have ended
        self.has_begun = False  # there was an episode to open
        self._has_ended = False
        self._is_closed = False  # the server ends
        self.routes = [
            Route("/rollouts", self._open, methods=["POST"]),
            Route("/rollouts/{key}/end", self._end, methods=["POST"]),
        ]

    def add(self, spec: EpisodeSpec) -> QueuedEpisode:
        self.has_begun = True
        queued = QueuedEpisode(spec=spec, task=spec.task)
        if (state := self._groups.get(spec.group)) is not None:
            queued.task, queued.is_late = state.task, state.is_late
        self._queued.append(queued)
        return queued

    def remove(self, queued: QueuedEpisode, episode: Episode) -> None:
        self._queued.remove(queued)
        self._num_moves += 1
        queued.change(episode=episode)
        state = self._groups.get(queued.spec.group)
        if state is None:
            return
        state.num_left -= 1
        if not state.num_left:
            state.timer.cancel()
            del self._groups[queued.spec.group]

    def end_time(self, group: str) -> None:
        """Mark the group with this id as late: its time limit is over."""
        self._groups[group].is_late = True
        for queued in self._queued:
            if queued.spec.group == group:
                queued.change(is_late=True)

    def end(self) -> None:
        """Tell all clients that training has ended."""
        self._has_ended = True

    def close(self) -> None:
        """Answer all who wait, because the server ends, perhaps to be resumed."""
        self._is_closed = True
        for queued in self._queued:
            queued.change(is_lost=True)

    def _take(self, own: tuple[str, Mapping[str, Any]] | None) -> QueuedEpisode | None:
        """Claim an episode: of a group begun with the same task, or else of a new group."""
        digest = own and own[0]
        free = [each for each in self._queued if not (each.is_claimed or each.is_late)]
        begun = [each for each in free if each.spec.group in self._groups]
        fitting = [each for each in begun if self._groups[each.spec.group].own == digest]
        others = [each for each in free if each.spec.group not in self._groups]
        queued = next(iter([*fitting, *others]), None)
        if queued is None:
            return None
        if queued.spec.group not in self._groups:
            self._begin(queued.spec, own)
        self._num_moves += 1
        queued.change(is_claimed=True)
        return queued

    async def watch(self, notify: Callable[[str], None]) -> None:
        """Report groups that nobody plays to the end, after STALL_S and then ever more rarely."""
        pause_s = STALL_S
        while True:
            num_moves = self._num_moves
            await asyncio.sleep(pause_s)
            is_played = any(queued.is_claimed for queued in self._queued)
            unfinished = self._unfinished()
            if is_played or unfinished is None or num_moves != self._num_moves:
                pause_s = STALL_S
            else:
                notify(unfinished)
                pause_s *= 2

    def _unfinished(self) -> str | None:
        """Say which begun groups wait for more episodes, and until when; None if none does."""
        claimed = Counter(each.spec.group for each in self._queued if each.is_claimed)
        now, lacking = asyncio.get_running_loop().time(), []
        for group, state in self._groups.items():
            if (num_lacking := state.num_left - claimed[group]) and not state.is_late:
                task = state.task.id + (f" {json.dumps(state.task.reset)}" if state.own else "")
                left_s = max(0.0, state.timer.when() - now)
                lacking.append(
                    f"{num_lacking} more of the task {shortened(task, MAX_TASK_LENGTH)} "
                    f"(ends in {left_s:.0f} s)"
                )
        if not lacking:
            return None
        if len(lacking) > MAX_STALLED:
            lacking[MAX_STALLED:] = [f"those of {len(lacking) - MAX_STALLED} more groups"]
        return (
            f"the step waits for episodes of groups that clients have begun: {'; '.join(lacking)}. "
            f"agent.group_timeout_s={self._config.group_timeout_s:g} ends a group that nobody plays"
        )

    def _why_none(self) -> str:
        if not self.has_begun:
            return "no episode waits for a client yet, because the server has not begun to play"
        reason = "all are being played, or the policy is being updated"
        return f"no episode waits for a client now: {self._unfinished() or reason}"

    def _begin(self, spec: EpisodeSpec, own: tuple[str, Mapping[str, Any]] | None) -> None:
        """Start the timer of the episode's group, and give the group the client's task."""
        timer = asyncio.get_running_loop().call_later(
            self._config.group_timeout_s, self.end_time, spec.group
        )
        task = spec.task
        if own is not None:
            digest, given = own
            task = replace(
                task,
                id=f"{CLIENT_SPLIT}/{digest[:12]}",
                split=CLIENT_SPLIT,
                seed=given.get("seed", task.seed),
                reset={name: value for name, value in given.items() if name != "seed"},
            )
        self._groups[spec.group] = _GroupState(
            own=own and own[0], task=task, timer=timer, num_left=spec.group_size
        )
        for queued in self._queued:
            if queued.spec.group == spec.group:
                queued.task = task

    async def _open(self, request: Request) -> Response:
        """Answer with an episode, or with 429 if none waits for a client."""
        try:
            own, wait_s = _read_request(request.scope[PARSED])
        except ValueError as error:
            return error_response(422, str(error))
        if (run := request.scope[PARSED].get("run", self.run)) != self.run:
            text = f"the server is now that of {self.run}, but this client plays for {run!r:.80}"
            return error_response(409, f"{text}; restart the client to play for the server's run")
        latest = time.monotonic() + wait_s
        while not (self._has_ended or self._is_closed):
            if await request.is_disconnected():
                return Response(status_code=499)  # to nobody
            if (queued := self._take(own)) is not None:
                await queued.until(
                    lambda: bool(queued.rollout or queued.episode or self._is_closed)
                )
                if queued.rollout is not None:
                    return _Presence(self.run, queued, queued.rollout)
                if queued.episode is None:
                    break
                message = f"the environment has failed: {queued.episode.error}"
                return _later(503, message)
            if time.monotonic() >= latest:
                return _later(429, self._why_none())
            await asyncio.sleep(POLL_S)
        return error_response(410, "training has ended") if self._has_ended else _server_ends()

    async def _end(self, request: Request) -> Response:
        key = request.path_params["key"]
        found = [each for each in self._queued if each.rollout and each.rollout.key == key]
        if not found or found[0].report is not None:
            return error_response(404, "the episode is over")
        queued = found[0]
        assert queued.rollout is not None
        try:
            report = read_report(request.scope[PARSED])
        except ValueError as error:
            return error_response(422, str(error))
        has_reward = report.reward is not None or bool(queued.rollout.steps.taken)
        if self._needs_reward and not has_reward and report.error is None:
            return error_response(
                422, "report a reward: no step was taken, and reward.terms has no judge or verifier"
            )
        queued.change(report=report)
        await queued.until(lambda: queued.episode is not None or self._is_closed)
        if queued.episode is None:
            return _server_ends()
        return JSONResponse({"status": queued.episode.status, "error": queued.episode.error})


class _Presence(Response):
    """An answer that stays open until its rollout is over or its client is gone."""

    def __init__(self, run: str, queued: QueuedEpisode, rollout: OpenRollout) -> None:
        super().__init__()
        self._run = run
        self._queued = queued
        self._rollout = rollout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        queued = self._queued
        opened = {
            "run": self._run,
            "key": self._rollout.key,
            "task": self._rollout.task,
            "group": queued.spec.group,
            "group_size": queued.spec.group_size,
        }
        watching = asyncio.create_task(_left(receive))
        watching.add_done_callback(lambda _: queued.change(is_lost=True))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            line = json.dumps(opened).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
            while not (queued.episode or queued.is_lost):
                try:
                    over = queued.until(lambda: bool(queued.episode or queued.is_lost))
                    await asyncio.wait_for(over, KEEP_ALIVE_S)
                except TimeoutError:
                    await send({"type": "http.response.body", "body": b"\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _read_request(body: Any) -> tuple[tuple[str, Mapping[str, Any]] | None, float]:
    """Return the client's own task with its digest, and how long the client waits."""
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")
    wait_s, task = body.get("wait_s", 0.0), body.get("task")
    if not is_number(wait_s, MAX_WAIT_S) or wait_s < 0:
        raise ValueError(f"wait_s is {wait_s!r:.40}; expected seconds, at most {MAX_WAIT_S:g}")
    if task is None:
        return None, wait_s
    if not isinstance(task, dict):
        raise ValueError(f"task is {task!r:.40}; expected an object, the keywords of a reset")
    seed = task.get("seed", 0)
    if type(seed) is not int or seed < 0:
        raise ValueError(
            f"task has seed={seed!r:.40}; expected that of the reset, a whole number from 0 on: "
            "leave it out for a seed of the run, or rename it if it is data of yours"
        )
    text = json.dumps(task, sort_keys=True)
    return (hashlib.sha256(text.encode()).hexdigest(), task), wait_s


def read_report(body: Any) -> Report:
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")
    reward, metrics, error = body.get("reward"), body.get("metrics") or {}, body.get("error")
    if reward is not None and not is_number(reward, MAX_REWARD):
        raise ValueError(
            f"reward is {reward!r:.40}; expected a number of at most {MAX_REWARD:g} in absolute "
            "value, or null to ask for judging"
        )
    if (
        not isinstance(metrics, dict)
        or len(metrics) > MAX_METRICS
        or not all(is_number(value, MAX_REWARD) for value in metrics.values())
    ):
        raise ValueError(f"metrics has to be an object of at most {MAX_METRICS} numbers")
    if error is not None and not isinstance(error, str):
        raise ValueError(f"error is {error!r:.40}; expected a string")
    return Report(reward=None if reward is None else float(reward), metrics=metrics, error=error)


def is_number(value: Any, limit: float) -> bool:
    return type(value) in (int, float) and abs(value) <= limit  # NaN compares as False.


def _server_ends() -> Response:
    return _later(503, "the server ends before training has; it may be resumed")


def _later(status: int, message: str) -> Response:
    response = error_response(status, message)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
