"""Engine `local`: the policy in this process.

The episodes of a rollout batch are divided into batches by their numbers. A batch is decoded when
all of its episodes that are playing wait for a completion. If not all of them play at once, all
batches wait for each other, because an episode's end then lets another one of any batch begin. The
order in which environments answer, and the number of threads, therefore have no effect: the same
requests give the same batches, and the same tokens and logprobs to the bit. Keys and values are
cached from turn to turn, so that only the new tokens of each prompt are computed.

In a game, frozen policies may play against the model. Each has batches of its own, which are
decoded when those of the model are.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from openenv_pipe.config.schema import LocalEngineConfig, TruncationConfig
from openenv_pipe.engines.base import Completion, Engine, StaticEngine, TokenRequest
from openenv_pipe.engines.episode_batch import EpisodeBatch
from openenv_pipe.errors import EngineError
from openenv_pipe.system.tasks import in_thread

if TYPE_CHECKING:
    from openenv_pipe.models.policy import Policy

_BATCH_SIZE = 128  # episodes at most; larger batches cost as much processor time per token
_SMALLEST_BATCH = 32  # episodes, if there are two; smaller batches cost more per token
_NEIGHBOURS = 8  # consecutive episodes that are in the same batch


@dataclass(kw_only=True, slots=True)
class Waiting:
    request: TokenRequest
    completion: asyncio.Future[Completion]


@dataclass(kw_only=True, slots=True)
class _Barrier:
    """Episodes that wait for each other, because they are decoded together."""

    num_unfinished: int  # episodes
    limit: int  # how many of them play at once
    waiting: dict[int, list[Waiting]] = field(default_factory=dict)  # by episode

    @property
    def is_complete(self) -> bool:
        """Whether all episodes that are playing wait for a completion."""
        return 0 < len(self.waiting) == min(self.limit, self.num_unfinished) and all(
            len(each) == each[0].request.num_concurrent for each in self.waiting.values()
        )


class LocalEngine(StaticEngine):
    """Samples with the model that the learner updates, so that `publish` only counts versions.

    If the learner works while episodes are played, the engine has a copy of the model and threads
    of its own, and `refresh` copies the learner's weights.
    """

    capabilities = LocalEngineConfig.capabilities

    def __init__(
        self,
        model: "Policy",
        *,
        max_episodes: int,
        executor: Executor,
        batch_executor: Executor | None = None,
        refresh: Callable[[], None] | None = None,
        sampling: TruncationConfig | None = None,
        frozen: "Mapping[str, Policy] | None" = None,
    ) -> None:
        """executor: decodes a rollout batch that is not divided.

        batch_executor: decodes the batches of one that is; None: none is divided.
        sampling: truncation (top_p, top_k) of all requests; None: as each request asks.
        frozen: models that play against `model`, by the name that requests give as `weights`; this
            mapping may be changed while nothing is played.
        """
        self.frozen = dict(frozen or {})
        self._sampling = sampling
        self.max_episodes = max_episodes
        self._refresh = refresh
        self._model = model
        self._executor = self._decoder = executor
        self._batch_executor = batch_executor
        self._version = 0
        self._batches: dict[str, list[EpisodeBatch]] = {}  # by the name of their weights
        self._barriers: list[_Barrier] = []  # by the number of a batch
        self.begin_rollouts(0, 0)

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        # A pass may have a copy of all weights, which is freed before the next one is made.
        self._batches = {}
        self._num_batches, self._decoder = 1, self._executor
        if self._batch_executor is not None and (num_batches := _num_batches(limit)) > 1:
            self._num_batches, self._decoder = num_batches, self._batch_executor
        self._batches[""] = _new_batches(self._model, self._num_batches)
        self._num_open: Counter[int] = Counter()  # requests of each episode without a completion
        if num_episodes <= limit:  # No episode has to wait for another's end.
            counts = Counter(map(self._batch_number, range(num_episodes)))
            self._barriers = [
                _Barrier(num_unfinished=counts[number], limit=counts[number])
                for number in range(self._num_batches)
            ]
        else:
            barrier = _Barrier(num_unfinished=num_episodes, limit=limit)
            self._barriers = [barrier] * self._num_batches
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        """Sample in the next batch. Raises EngineError for more requests than `num_concurrent`."""
        self._num_open[request.episode] += 1
        try:
            if self._num_open[request.episode] > request.num_concurrent:
                raise EngineError(
                    f"episode {request.episode} has {self._num_open[request.episode]} requests at "
                    f"once, and they say num_concurrent={request.num_concurrent}; an engine that "
                    "batches the requests of all episodes has to declare is_exact=True"
                )
            completion = asyncio.get_running_loop().create_future()
            barrier = self._barriers[self._batch_number(request.episode)]
            waiting = barrier.waiting.setdefault(request.episode, [])
            waiting.append(Waiting(request=request, completion=completion))
            self._start_if_complete(barrier)
            return await completion
        finally:
            self._num_open[request.episode] -= 1

    def end_episode(self, episode: int) -> None:
        barrier = self._barriers[self._batch_number(episode)]
        barrier.num_unfinished -= 1
        barrier.waiting.pop(episode, None)
        self._start_if_complete(barrier)

    async def begin_update(self, *, idle: bool) -> None:
        """Free the caches and the copy of the weights, unless episodes are played meanwhile."""
        if idle:
            self._batches, self._barriers = {}, []

    async def publish(self, version: int) -> None:
        if self._refresh is not None:
            await in_thread(self._executor, self._refresh)
        self._version = version

    def _batch_number(self, episode: int) -> int:
        """Return the batch of an episode. Those of a group are neighbours, with equal prompts."""
        return episode // _NEIGHBOURS % self._num_batches

    def _start_if_complete(self, barrier: _Barrier) -> None:
        if not barrier.is_complete:
            return
        waiting: dict[tuple[str, int], list[Waiting]] = defaultdict(list)
        for episode in sorted(barrier.waiting):
            for each in barrier.waiting[episode]:
                waiting[each.request.weights, self._batch_number(episode)].append(each)
        barrier.waiting.clear()
        for weights, number in sorted(waiting):
            if weights not in self._batches:
                self._batches[weights] = _new_batches(self.frozen[weights], self._num_batches)
            self._start(self._batches[weights][number], waiting[weights, number])

    def _start(
        self, batch: EpisodeBatch, waiting: Sequence[Waiting]
    ) -> asyncio.Future[list[Completion]]:
        requests = [self._truncated(each.request) for each in waiting]
        running = in_thread(self._decoder, batch.generate, requests, self._version)
        running.add_done_callback(lambda done: _hand_out(done, waiting))
        return running

    def _truncated(self, request: TokenRequest) -> TokenRequest:
        if self._sampling is None or not self._sampling.distortions:
            return request
        top_p, top_k = min(request.top_p, self._sampling.top_p), self._sampling.top_k
        return replace(request, top_p=top_p, top_k=top_k)


class FrozenPolicy(StaticEngine):
    """Plays in a game with the weights of a frozen policy that a local engine has."""

    capabilities = LocalEngineConfig.capabilities

    def __init__(self, engine: Engine, weights: str) -> None:
        """weights: the frozen policy's name in the engine."""
        self.max_episodes = engine.max_episodes
        self._engine = engine
        self._weights = weights

    async def generate(self, request: TokenRequest) -> Completion:
        return await self._engine.generate(replace(request, weights=self._weights))


def _new_batches(model: "Policy", num: int) -> list[EpisodeBatch]:
    return [
        EpisodeBatch(forward, device=model.device, end_ids=model.end_ids)
        for forward in model.row_forwards(num)
    ]


def _num_batches(limit: int) -> int:
    """Return the number of batches for this number of episodes, the same on every machine."""
    return max(-(-limit // _BATCH_SIZE), min(2, limit // _SMALLEST_BATCH), 1)


def _hand_out(running: asyncio.Future[list[Completion]], waiting: Sequence[Waiting]) -> None:
    """Give each waiting request its completion, or the error that ended the batch."""
    error = None if running.cancelled() else running.exception()
    for place, each in enumerate(waiting):
        if each.completion.done():
            continue
        if running.cancelled():
            each.completion.cancel()
        elif error is not None:
            each.completion.set_exception(error)
        else:
            each.completion.set_result(running.result()[place])
