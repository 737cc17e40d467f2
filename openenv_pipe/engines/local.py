"""Engine `local`: transformers in this process, in waves.

A wave starts when all episodes that are playing wait for a completion, and serves them in one
batch, in the order of their numbers. The order in which environments answer therefore has no
effect: the same requests give the same batches, and the same tokens and logprobs to the bit. Keys
and values are cached from turn to turn, so a wave computes new tokens only.

Shape letters: R conversations of a wave, Q new tokens, V vocabulary.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from pydantic import JsonValue

from openenv_pipe.config.schema import LocalEngineConfig
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.sampling import sample, uniforms
from openenv_pipe.models.kv_cache import RaggedCache
from openenv_pipe.types import Finish


class CausalModel(Protocol):
    """The interface of a model for the local engine, as in `models.policy.Policy`."""

    device: torch.device
    num_layers: int
    end_id: int

    def hidden(
        self,
        token_ids_RQ: torch.Tensor,
        positions_RQ: torch.Tensor,
        mask: torch.Tensor,
        cache: RaggedCache,
    ) -> torch.Tensor:
        """Compute the last hidden states, [R, Q, hidden size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., V] of hidden states [..., hidden size]."""


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """One episode's place in the cache."""

    row: int = -1
    length: int = 0  # number of tokens whose keys and values are cached
    pending: list[int] = field(default_factory=list)  # the tokens after those
    num_sampled: int = 0

    def keep(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones. Their keys and values will be overwritten."""
        self.pending = self.pending[: max(0, num_tokens - self.length)]
        self.length = min(self.length, num_tokens)


@dataclass(kw_only=True, slots=True)
class _Waiting:
    request: TokenRequest
    completion: asyncio.Future[Completion]


class LocalEngine:
    """Samples with the model that the learner updates, so that `publish` only counts versions.

    If the learner works while episodes are played, the engine has a copy of the model and a thread
    of its own, and `refresh` copies the learner's weights.
    """

    capabilities = LocalEngineConfig.capabilities

    def __init__(
        self,
        model: CausalModel,
        *,
        max_episodes: int,
        executor: Executor,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self.max_episodes = max_episodes
        self._refresh = refresh
        self._model = model
        self._executor = executor
        self._version = 0
        self.begin_collection(0, 0)

    def begin_collection(self, num_episodes: int, limit: int) -> int:
        self._num_unfinished = num_episodes
        self._limit = limit
        self._waiting: dict[int, _Waiting] = {}
        self._conversations = _Conversations(self._model)
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        completion = asyncio.get_running_loop().create_future()
        self._waiting[request.episode] = _Waiting(request=request, completion=completion)
        self._start_if_all_wait()
        return await completion

    def end_episode(self, episode: int) -> None:
        self._num_unfinished -= 1
        self._waiting.pop(episode, None)
        self._conversations.forget(episode)
        self._start_if_all_wait()

    async def begin_update(self, *, idle: bool) -> None:
        """Do nothing: the cache is dropped with each collection."""

    async def publish(self, version: int) -> None:
        if self._refresh is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._refresh)
        self._version = version

    async def metrics(self) -> Mapping[str, float]:
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        return {}

    def _start_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == min(self._limit, self._num_unfinished):
            wave = [self._waiting[episode] for episode in sorted(self._waiting)]
            self._waiting = {}
            requests = [waiting.request for waiting in wave]
            running = asyncio.get_running_loop().run_in_executor(
                self._executor, self._conversations.run_wave, requests, self._version
            )
            running.add_done_callback(lambda done: _hand_out(done, wave))


class _Conversations:
    """The conversations of one collection, and their cache.

    A wave that still runs after its collection was cancelled uses the cache of that collection.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._by_episode: dict[int, _Conversation] = {}
        self._cache = RaggedCache(model.num_layers)

    def forget(self, episode: int) -> None:
        self._by_episode.pop(episode, None)

    def run_wave(self, requests: Sequence[TokenRequest], version: int) -> dict[int, Completion]:
        """Compute a completion for each episode, in the executor's thread."""
        with torch.inference_mode():
            requests = self._seat(requests)
            conversations = [self._by_episode[request.episode] for request in requests]
            for conversation, request in zip(conversations, requests, strict=True):
                if request.num_kept is not None:
                    conversation.keep(request.num_kept)
                conversation.pending += request.new_ids
            return _Wave(self._model, self._cache, requests, conversations).run(version)

    def _seat(self, requests: Sequence[TokenRequest]) -> list[TokenRequest]:
        """Assign cache row r to request r of the list that is returned."""
        known = [request for request in requests if request.episode in self._by_episode]
        new = [request for request in requests if request.episode not in self._by_episode]
        rows = [self._by_episode[request.episode].row for request in known]
        if rows != list(range(self._cache.num_rows)):  # episodes have ended: close the gaps
            index = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
            self._cache = self._cache.copy_rows(index)
        self._cache.add_rows(len(new))
        for request in new:
            self._by_episode[request.episode] = _Conversation()
        for row, request in enumerate(known + new):
            self._by_episode[request.episode].row = row
        return known + new


def _hand_out(running: asyncio.Future[dict[int, Completion]], wave: Sequence[_Waiting]) -> None:
    """Give each waiting episode its completion, or the error that ended the wave."""
    error = None if running.cancelled() else running.exception()
    for waiting in wave:
        if waiting.completion.done():
            continue
        if running.cancelled():
            waiting.completion.cancel()
        elif error is not None:
            waiting.completion.set_exception(error)
        else:
            waiting.completion.set_result(running.result()[waiting.request.episode])


class _Wave:
    """One batch of completions: a forward pass over new tokens, then one for each token."""

    def __init__(
        self,
        model: CausalModel,
        cache: RaggedCache,
        requests: Sequence[TokenRequest],
        conversations: Sequence[_Conversation],
    ) -> None:
        self._model = model
        self._cache = cache
        self._requests = requests
        self._conversations = conversations
        self._token_ids: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._temperatures_R = torch.tensor(
            [request.temperature for request in requests], device=model.device
        )
        self._seeds_R = np.array([request.seed for request in requests], dtype=np.uint64)

    def run(self, version: int) -> dict[int, Completion]:
        self._continue_from(self._cache, list(range(len(self._requests))))
        return {
            request.episode: Completion(
                token_ids=token_ids,
                logprobs=logprobs,
                finish=Finish.STOP if token_ids[-1] == self._model.end_id else Finish.LENGTH,
                policy_versions=[version],
            )
            for request, token_ids, logprobs in zip(
                self._requests, self._token_ids, self._logprobs, strict=True
            )
        }

    def _continue_from(self, cache: RaggedCache, rows: list[int]) -> None:
        """Generate until all `rows` are done; cache row k belongs to rows[k].

        Once half of them are done, the others continue in a smaller copy of the cache.
        """
        active = rows
        while active:
            if 2 * len(active) <= len(rows):
                places = {row: place for place, row in enumerate(rows)}
                index = torch.tensor([places[row] for row in active], device=self._model.device)
                smaller = cache.copy_rows(index)
                self._continue_from(smaller, active)
                cache.put_rows(index, smaller)
                return
            self._forward_and_sample(cache, rows, set(active))
            active = [row for row in active if not self._is_done(row)]

    def _is_done(self, row: int) -> bool:
        token_ids = self._token_ids[row]
        return token_ids[-1] == self._model.end_id or (
            len(token_ids) >= self._requests[row].max_tokens
        )

    def _forward_and_sample(self, cache: RaggedCache, rows: list[int], active: set[int]) -> None:
        """Sample a token for every active row. The results of the other rows are dropped."""
        last_R = self._forward(cache, rows, active)
        index = np.array(rows)
        counters_R = np.array([self._conversations[row].num_sampled for row in rows])
        uniforms_R = uniforms(self._seeds_R[index], counters_R.astype(np.uint64))
        ids_R, logprobs_R = sample(
            last_R,
            self._temperatures_R[torch.from_numpy(index).to(self._model.device)],
            torch.from_numpy(uniforms_R).to(self._model.device),
        )
        for row, token_id, logprob in zip(rows, ids_R.tolist(), logprobs_R.tolist(), strict=True):
            if row in active:
                self._token_ids[row].append(token_id)
                self._logprobs[row].append(logprob)
                self._conversations[row].pending = [token_id]
                self._conversations[row].num_sampled += 1

    def _forward(self, cache: RaggedCache, rows: list[int], active: set[int]) -> torch.Tensor:
        """Compute logits [R, V] after each row's pending tokens, which are then cached."""
        conversations = [self._conversations[row] for row in rows]
        pending = [conversation.pending or [0] for conversation in conversations]
        width = max(len(ids) for row, ids in zip(rows, pending, strict=True) if row in active)
        device = self._model.device
        token_ids_RQ = torch.tensor([(ids + [0] * width)[:width] for ids in pending], device=device)
        lengths_R1 = torch.tensor([[item.length] for item in conversations], device=device)
        positions_RQ = lengths_R1 + torch.arange(width, device=device)
        last_R = torch.tensor([min(len(ids), width) - 1 for ids in pending], device=device)
        mask = cache.write_at(positions_RQ)
        hidden_RQ = self._model.hidden(token_ids_RQ, positions_RQ, mask, cache)
        for row, conversation in zip(rows, conversations, strict=True):
            if row in active:
                conversation.length += len(conversation.pending)
        return self._model.logits(hidden_RQ[torch.arange(len(rows), device=device), last_R])
