"""Engine `local`: the policy in this process, in waves.

The episodes of a collection are divided into lanes by their numbers. A wave of a lane starts when
all of its episodes that are playing wait for a completion, and serves them in one batch. If not all
episodes of the collection play at once, all lanes start together, because an episode's end then
lets another one of any lane begin. The order in which environments answer, and the number of
threads, therefore have no effect: the same requests give the same batches, and the same tokens and
logprobs to the bit. Keys and values are cached from turn to turn, so a wave computes the new tokens
of each prompt only.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from pydantic import JsonValue

from openenv_pipe.config.schema import LocalEngineConfig
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.lane import Lane
from openenv_pipe.errors import EngineError
from openenv_pipe.models.row_forward import RowForward
from openenv_pipe.system.tasks import in_thread

_LANE_SIZE = 128  # episodes at most; larger batches cost as much processor time per token
_SMALLEST_LANE = 32  # episodes, if there are two; smaller batches cost more per token
_NEIGHBOURS = 8  # episodes that follow each other and are in the same lane


class SamplingModel(Protocol):
    """The interface of a model for the local engine, as in `models.policy.Policy`."""

    device: torch.device
    end_ids: frozenset[int]

    def row_forwards(self, num: int) -> Sequence[RowForward]:
        """Return forward passes with empty caches, for the weights of now."""


@dataclass(kw_only=True, slots=True)
class Waiting:
    """A request, and the future of its answer."""

    request: TokenRequest
    completion: asyncio.Future[Completion]


@dataclass(kw_only=True, slots=True)
class _Cohort:
    """Episodes that wait for each other, because together they make the next waves."""

    lanes: Sequence[Lane]
    num_unfinished: int  # episodes
    limit: int  # how many of them play at once
    waiting: dict[int, list[Waiting]] = field(default_factory=dict)  # by episode

    @property
    def is_complete(self) -> bool:
        """Whether all episodes that are playing wait for a completion."""
        return 0 < len(self.waiting) == min(self.limit, self.num_unfinished) and all(
            len(each) == each[0].request.num_concurrent for each in self.waiting.values()
        )


class LocalEngine:
    """Samples with the model that the learner updates, so that `publish` only counts versions.

    If the learner works while episodes are played, the engine has a copy of the model and threads
    of its own, and `refresh` copies the learner's weights.
    """

    capabilities = LocalEngineConfig.capabilities

    def __init__(
        self,
        model: SamplingModel,
        *,
        max_episodes: int,
        executor: Executor,
        in_lanes: bool = False,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """executor: runs the waves.

        in_lanes: whether a collection is divided into lanes, for an executor of several threads.
        """
        self.max_episodes = max_episodes
        self._refresh = refresh
        self._model = model
        self._executor = executor
        self._in_lanes = in_lanes
        self._version = 0
        self.begin_collection(0, 0)

    def begin_collection(self, num_episodes: int, limit: int) -> int:
        num_lanes = _num_lanes(limit) if self._in_lanes else 1
        device, end_ids = self._model.device, self._model.end_ids
        forwards = self._model.row_forwards(num_lanes)
        self._num_open: Counter[int] = Counter()  # requests of each episode without a completion
        self._lanes = [Lane(forward, device=device, end_ids=end_ids) for forward in forwards]
        if num_episodes <= limit:  # No episode has to wait for another's end.
            counts = Counter(self._lane_number(episode) for episode in range(num_episodes))
            self._cohorts = [
                _Cohort(lanes=[lane], num_unfinished=counts[number], limit=counts[number])
                for number, lane in enumerate(self._lanes)
            ]
        else:
            cohort = _Cohort(lanes=self._lanes, num_unfinished=num_episodes, limit=limit)
            self._cohorts = [cohort] * num_lanes
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        """Sample in the next batch. Raises EngineError for a request that no batch can wait for."""
        self._num_open[request.episode] += 1
        try:
            if self._num_open[request.episode] > request.num_concurrent:
                raise EngineError(
                    f"episode {request.episode} has {self._num_open[request.episode]} requests at "
                    f"once, and they say num_concurrent={request.num_concurrent}; an engine that "
                    "batches the requests of all episodes has to declare is_exact=True"
                )
            completion = asyncio.get_running_loop().create_future()
            cohort = self._cohorts[self._lane_number(request.episode)]
            waiting = cohort.waiting.setdefault(request.episode, [])
            waiting.append(Waiting(request=request, completion=completion))
            self._start_if_complete(cohort)
            return await completion
        finally:
            self._num_open[request.episode] -= 1

    def end_episode(self, episode: int) -> None:
        number = self._lane_number(episode)
        cohort = self._cohorts[number]
        cohort.num_unfinished -= 1
        cohort.waiting.pop(episode, None)
        self._lanes[number].end_episode(episode)
        self._start_if_complete(cohort)

    async def begin_update(self, *, idle: bool) -> None:
        """Do nothing: the cache is dropped with each collection."""

    async def publish(self, version: int) -> None:
        if self._refresh is not None:
            await in_thread(self._executor, self._refresh)
        self._version = version

    async def metrics(self) -> Mapping[str, float]:
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        return {}

    def _lane_number(self, episode: int) -> int:
        """Return the lane of an episode. Those of a group are neighbours, with equal prompts."""
        return episode // _NEIGHBOURS % len(self._lanes)

    def _start_if_complete(self, cohort: _Cohort) -> None:
        if not cohort.is_complete:
            return
        waiting = [each for episode in sorted(cohort.waiting) for each in cohort.waiting[episode]]
        cohort.waiting.clear()
        for lane in cohort.lanes:
            wave = [
                each
                for each in waiting
                if self._lanes[self._lane_number(each.request.episode)] is lane
            ]
            if wave:
                self._start(lane, wave)

    def _start(self, lane: Lane, wave: Sequence[Waiting]) -> asyncio.Future[list[Completion]]:
        requests = [waiting.request for waiting in wave]
        running = in_thread(self._executor, lane.run_wave, requests, self._version)
        running.add_done_callback(lambda done: _hand_out(done, wave))
        return running


def _num_lanes(limit: int) -> int:
    """Return the number of lanes for so many episodes at once: the same on every machine."""
    return max(-(-limit // _LANE_SIZE), min(2, limit // _SMALLEST_LANE), 1)


def _hand_out(running: asyncio.Future[list[Completion]], wave: Sequence[Waiting]) -> None:
    """Give each waiting request its completion, or the error that ended the wave."""
    error = None if running.cancelled() else running.exception()
    for place, waiting in enumerate(wave):
        if waiting.completion.done():
            continue
        if running.cancelled():
            waiting.completion.cancel()
        elif error is not None:
            waiting.completion.set_exception(error)
        else:
            waiting.completion.set_result(running.result()[place])
