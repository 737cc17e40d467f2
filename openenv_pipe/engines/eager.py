"""Engine `local` for clients that come and go: no episode waits for all others to ask."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from openenv_pipe.engines.base import Completion, TokenRequest, turn_seed
from openenv_pipe.engines.episode_batch import EpisodeBatch
from openenv_pipe.engines.local import LocalEngine, Waiting
from openenv_pipe.models.forward.row_forward import RowForward


class EagerEngine(LocalEngine):
    """Samples one batch for the requests that wait, while the next ones gather.

    Which requests meet in a batch depends on time, and so does the rounding of logprobs. Keys and
    values are not cached from one completion of an episode to the next: each computes its prompt.
    """

    capabilities = replace(LocalEngine.capabilities, is_exact=False)

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        self._waiting: list[Waiting] = []
        self._is_sampling = False
        self._forwards: Sequence[RowForward] = ()  # freed before the next one is made
        self._forwards = self._model.row_forwards(1)
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        # How many tokens an episode's concurrent requests have sampled depends on time.
        seed = turn_seed(request.seed, request.turn)
        request = replace(request, seed=seed, num_sampled=0)
        completion = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request=request, completion=completion))
        self._start_next()
        return await completion

    def end_episode(self, episode: int) -> None:
        """Do nothing: no batch continues the one before it."""

    def _start_next(self) -> None:
        self._waiting = [each for each in self._waiting if not each.completion.done()]  # has left
        if self._is_sampling or not self._waiting:
            return
        limit = self.max_episodes
        chosen, self._waiting = self._waiting[:limit], self._waiting[limit:]
        # A new batch has no cached prompts, and overwrites the rows of the one before.
        (forward,) = self._forwards
        batch = EpisodeBatch(forward, device=self._model.device, end_ids=self._model.end_ids)
        self._is_sampling = True
        running = self._start(batch, chosen)
        running.add_done_callback(self._end_batch)

    def _end_batch(self, _: object) -> None:
        self._is_sampling = False
        self._start_next()
