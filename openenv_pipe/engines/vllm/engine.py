"""Engine `vllm`: a server's completions, for a policy that is trained here.

Every token was sampled by the server from the model's own distribution at the temperature, with the
logprob that it gives; its random numbers come from the episode's seed and the turn.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.base import Completion, Request, turn_seed
from openenv_pipe.engines.vllm.canary import Canary
from openenv_pipe.engines.vllm.client import BASE, Sampled, ServerGoneError, VllmClient
from openenv_pipe.engines.vllm.first_turns import Asked, FirstTurns
from openenv_pipe.engines.vllm.life import ServerLife
from openenv_pipe.engines.vllm.publish import Publisher
from openenv_pipe.engines.vllm.server_metrics import ServerMetrics
from openenv_pipe.errors import EngineError
from openenv_pipe.types import Finish

Result = TypeVar("Result")
MOST_TRIES = 4  # of one request, whatever its server went through


class VllmEngine:
    """See `engines.base.Engine`. Opened by `opening.py`."""

    publishes_in_flight = True

    def __init__(
        self,
        config: VllmEngineConfig,
        *,
        end_id: int,
        life: ServerLife,
        publisher: Publisher,
        canary: Canary,
        executor: Executor,
        facts: Mapping[str, Any],
    ) -> None:
        self.max_episodes = config.max_requests
        self.server_metrics = ServerMetrics(self._read_metrics)
        self._config = config
        self._end_id = end_id
        self._life = life
        self._publisher = publisher
        self._canary = canary
        self._executor = executor
        self._facts = facts
        self._ids: dict[int, list[int]] = {}  # each episode's conversation so far
        self._next_number = 0
        self._measured: dict[str, float] = {}
        self._first_turns = FirstTurns(self._ask)

    def facts(self) -> Mapping[str, Any]:
        return self._facts

    def expect(self, num_episodes: int, limit: int) -> int:
        """Collections may overlap, so no number comes again."""
        first, self._next_number = self._next_number, self._next_number + num_episodes
        self.server_metrics.begin()
        return first

    async def generate(self, request: Request) -> Completion:
        ids = self._ids.setdefault(request.episode, [])
        ids += request.new_ids
        model, version = self._publisher.model, self._publisher.version
        asked = Asked(model=model, prompt=tuple(ids), sampling=self._sampling(request))
        if request.turn == 0 and request.group_seed is not None:
            sampled = await self._first_turns.sample(asked, request.group_seed, request.member)
        else:
            seed = turn_seed(request.seed, request.turn)
            (sampled,) = await self._ask(asked, seed, 1)
        ids += sampled.token_ids
        # An adapter stays with its request; all weights may be replaced under it.
        spans = [int(name) for name in sampled.versions] if model == BASE else [version]
        return self._completion(sampled, spans)

    def finish(self, episode: int) -> None:
        self._ids.pop(episode, None)

    async def publish(self, version: int) -> None:
        """Writes, sends, and has the canary look. Requests under way go on."""
        started = time.perf_counter()
        published = await self._publisher.write(version)
        loop = asyncio.get_running_loop()
        written = time.perf_counter()
        expected_PV = await loop.run_in_executor(self._executor, self._canary.compute)
        expected = time.perf_counter()
        # Together: a server that is started again between the two would fail its check.
        self._canary.expect(expected_PV)
        self._publisher.adopt(published)
        await self._with_server(lambda client: self._publisher.send(client, published))
        sent = time.perf_counter()
        await self._with_server(lambda client: self._check(client, f"after step {version}"))
        await self._with_server(self._publisher.retire)
        self._measured["time/publish_s"] = sent - started - (expected - written)
        self._measured["time/canary_s"] = time.perf_counter() - sent + (expected - written)

    async def _ask(self, asked: Asked, seed: int, count: int) -> list[Sampled]:
        """So many completions, with the seeds from `seed` on."""
        sampling = {**asked.sampling, "seed": seed, "n": count}
        return await self._with_server(
            lambda client: client.generate(asked.model, asked.prompt, sampling)
        )

    async def restore(self, client: VllmClient) -> None:
        """For a server that has just started, instead of one that died."""
        await self._publisher.restore(client)
        await self._check(client, "after the restart of the server")

    async def metrics(self) -> dict[str, float]:
        """See `Engine.metrics`."""
        measured, self._measured = self._measured, {}
        measured["engine/restarts"] = self._life.num_restarts
        return measured | await self.server_metrics.summary()

    async def _check(self, client: VllmClient, when: str) -> None:
        difference = await self._canary.check(client, self._publisher.model, when)
        self._measured["canary/difference"] = difference
        if self._canary.moved is not None:
            self._measured["canary/moved"] = self._canary.moved

    async def _with_server(self, call: Callable[[VllmClient], Any]) -> Any:
        """Calls until a server has answered. A cancelled call is aborted on the server."""
        cause: Exception | None = None
        for _ in range(MOST_TRIES):
            client = await self._life.serving()
            try:
                return await call(client)
            except ServerGoneError as error:
                cause = error
                await self._life.look_after(client)
        raise EngineError(f"{MOST_TRIES} requests in a row got no answer, the last: {cause}")

    async def _read_metrics(self) -> str | None:
        client = self._life.client
        if client is None:
            return None
        try:
            return await client.metrics_text()
        except ServerGoneError:
            return None

    def _sampling(self, request: Request) -> dict[str, Any]:
        return {
            **self._config.sampling.model_dump(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stop_token_ids": [self._end_id],
            "ignore_eos": True,  # a model may name more than one; a turn has one end
        }

    def _completion(self, sampled: Sampled, versions: list[int]) -> Completion:
        ended = bool(sampled.token_ids) and sampled.token_ids[-1] == self._end_id
        return Completion(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish=Finish.STOP if ended else Finish.LENGTH,
            policy_versions=versions,
        )
