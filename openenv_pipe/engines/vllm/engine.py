"""Engine `vllm`: completions of vLLM servers, which receive every new policy.

A server samples every token from the model's distribution at the request's temperature, and returns
its logprob. The random numbers are determined by the episode's seed and the turn.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.base import Completion, TokenRequest, turn_seed
from openenv_pipe.engines.vllm.answers import Sampled, ServerGoneError
from openenv_pipe.engines.vllm.client import Features
from openenv_pipe.engines.vllm.group_requests import GroupRequests, SharedRequest
from openenv_pipe.engines.vllm.image_features import ImageEncoder
from openenv_pipe.engines.vllm.logprob_check import LogprobCheck
from openenv_pipe.engines.vllm.replica import MAX_TRIES, Replica
from openenv_pipe.engines.vllm.routing import Router
from openenv_pipe.engines.vllm.server_metrics import summarise
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import EngineError
from openenv_pipe.system.tasks import in_thread, run_all
from openenv_pipe.types import Finish

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights


class VllmEngine:
    """An `engines.base.Engine`, which `build.open_engine` makes."""

    capabilities = VllmEngineConfig.capabilities

    def __init__(
        self,
        config: VllmEngineConfig,
        *,
        weights: "PolicyWeights",
        replicas: Sequence[Replica],
        versions: Versions,
        logprob_check: LogprobCheck,
        executor: Executor,
        sleep_level: int,
        facts: Mapping[str, Any],
    ) -> None:
        """sleep_level: vLLM's level of sleep during updates; 0: the servers stay awake."""
        self.max_episodes = config.max_requests * len(replicas)
        self.replicas = replicas
        self._config = config
        self._weights = weights
        self._sleep_level = sleep_level
        self._versions = versions
        self._logprob_check = logprob_check
        self._executor = executor
        self._facts = facts
        self._router = Router(replicas)
        self._next_number = 0
        self._measured: dict[str, float] = {}
        self._group_requests = GroupRequests(self._ask)
        self._encoder = ImageEncoder(weights)

    def facts(self) -> Mapping[str, Any]:
        return self._facts

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        """See `Engine`. Rollout batches may overlap, so every episode gets a number of its own."""
        first, self._next_number = self._next_number, self._next_number + num_episodes
        self._router.begin_rollouts(limit)
        return first

    async def generate(self, request: TokenRequest) -> Completion:
        """Sample a completion. Raises EngineError when no server answers."""
        sampled = await self._sample(request)
        ended = not self._weights.end_ids.isdisjoint(sampled.token_ids[-1:])
        return Completion(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish=Finish.STOP if ended else Finish.LENGTH,
            policy_versions=list(sampled.versions),
        )

    def end_episode(self, episode: int) -> None:
        self._router.forget(episode)

    async def begin_update(self, *, idle: bool) -> None:
        """Put the servers to sleep until `publish`, if the learner needs their memory."""
        self._versions.transfer.begin_update()
        if idle and self._sleep_level:
            started = time.perf_counter()
            await run_all(replica.sleep(self._sleep_level) for replica in self.replicas)
            self._measured["time/sleep_s"] = time.perf_counter() - started

    async def publish(self, version: int) -> None:
        """Write the policy once, send it to all servers, and check the logprobs of each.

        Unfinished requests continue. A server that is being restarted gets the policy when it is
        up again; this method waits for restarts only if all servers are being restarted.

        Raises:
            EngineError: a server's restarts are used up, or it rejects the policy.
            TrainingError: a server's logprobs differ from the learner's afterwards.
        """
        self._router.reject_lost()
        started = time.perf_counter()
        expected_PV = await in_thread(self._executor, self._logprob_check.compute)
        expected = time.perf_counter()
        published = await self._versions.adopt(version, expected_PV)
        self._logprob_check.expect(expected_PV)
        if self._sleep_level:
            await in_thread(self._executor, self._weights.free_memory)
        served = [each for each in self.replicas if each.client is not None] or self.replicas
        for replica in self.replicas:
            replica.is_late = replica not in served
        await run_all(replica.send(published) for replica in served)
        sent = time.perf_counter()
        await run_all(replica.check(f"after step {version}") for replica in served)
        clients = [replica.client for replica in self.replicas]
        await self._versions.retire([client for client in clients if client is not None])
        self._measured["time/publish_s"] = sent - expected
        self._measured["time/logprob_check_s"] = time.perf_counter() - sent + expected - started
        self._measured["logprob_check/difference"] = max(each.difference for each in served)
        if self._logprob_check.moved is not None:
            self._measured["logprob_check/moved"] = self._logprob_check.moved

    async def metrics(self) -> dict[str, float]:
        measured, self._measured = self._measured, {}
        measured["engine/restarts"] = sum(each.num_restarts for each in self.replicas)
        servers = await asyncio.gather(*(each.metrics.measured() for each in self.replicas))
        return measured | summarise(servers)

    async def _sample(self, request: TokenRequest) -> Sampled:
        """Sample from the episode's server, or from another one if that server is gone."""
        cause: Exception | None = None
        for _ in range(MAX_TRIES):
            replica = self._router.replica_of(request.episode, request.group_seed)
            shared = SharedRequest(
                server=replica.number,
                prompt=tuple(request.prompt_ids),
                sampling=self._sampling(request),
                images=request.images,
            )
            try:
                if request.turn == 0 and request.group_seed is not None:
                    return await self._group_requests.sample(
                        shared, request.group_seed, request.member
                    )
                (sampled,) = await self._ask(shared, turn_seed(request.seed, request.turn), 1)
                return sampled
            except ServerGoneError as error:
                cause = error
        raise EngineError(f"{MAX_TRIES} requests in a row got no usable answer, the last: {cause}")

    async def _ask(self, shared: SharedRequest, seed: int, count: int) -> list[Sampled]:
        """Sample `count` completions with the seeds from `seed` on. Raises ServerGoneError."""
        sampling = {**shared.sampling, "seed": seed, "n": count}
        prompt: Sequence[int] = shared.prompt
        features: Features | None = None
        if shared.images:
            prompt, features = await asyncio.to_thread(
                self._encoder.encode, shared.prompt, shared.images
            )
        return await self.replicas[shared.server].sample(prompt, sampling, features)

    def _sampling(self, request: TokenRequest) -> dict[str, Any]:
        return {
            **self._config.sampling.model_dump(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stop_token_ids": sorted(self._weights.end_ids),
            "ignore_eos": True,  # nothing else ends a turn
        }
