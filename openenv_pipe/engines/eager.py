"""Engine `local` for players that come and go: no episode waits for all others to ask."""

import asyncio
from dataclasses import replace

from openenv_pipe.engines.base import Completion, TokenRequest, turn_seed
from openenv_pipe.engines.lane import Lane
from openenv_pipe.engines.local import LocalEngine, Waiting


class EagerEngine(LocalEngine):
    """Samples for those who wait, in one batch, while the next ones gather.

    Which requests meet in a batch depends on time, and so does the rounding of logprobs. Keys and
    values are not kept from one completion of an episode to the next: each computes its prompt.
    """

    capabilities = replace(LocalEngine.capabilities, is_exact=False)

    def begin_collection(self, num_episodes: int, limit: int) -> int:
        self._ids: dict[int, list[int]] = {}  # of each episode: its last prompt and completion
        self._waiting: list[Waiting] = []
        self._is_sampling = False
        self._num_requests = 0
        (self._forward,) = self._model.row_forwards(1)
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        ids = self._ids.get(request.episode, [])[: request.num_kept] + list(request.new_ids)
        seed = turn_seed(request.seed, request.turn)  # A new conversation counts from 0.
        # An episode may have several requests in a batch, whose conversations have other numbers.
        self._num_requests += 1
        whole = replace(request, episode=self._num_requests, new_ids=ids, num_kept=None, seed=seed)
        completion = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request=whole, completion=completion))
        self._start_next()
        sampled: Completion = await completion
        self._ids[request.episode] = ids + sampled.token_ids
        return sampled

    def end_episode(self, episode: int) -> None:
        self._ids.pop(episode, None)

    def _start_next(self) -> None:
        self._waiting = [each for each in self._waiting if not each.completion.done()]  # has left
        if self._is_sampling or not self._waiting:
            return
        wave, self._waiting = self._waiting[: self.max_episodes], self._waiting[self.max_episodes :]
        # A new lane has no conversations, and overwrites the rows of the one before.
        lane = Lane(self._forward, device=self._model.device, end_ids=self._model.end_ids)
        self._is_sampling = True
        running = self._start(lane, wave)
        running.add_done_callback(self._end_wave)

    def _end_wave(self, _: object) -> None:
        self._is_sampling = False
        self._start_next()
