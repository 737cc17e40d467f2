"""One server among those of the engine: its life, and the policy that it has.

While a policy is published, or a server is started again, one has another version than the next:
what a server samples is of its own version, and the canary compares with what belongs to that.
Refused here: asking again for a completion. Who asks goes on where `routing.py` says.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import BASE, Sampled, ServerGoneError, VllmClient
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.logprob_check import Canary
from openenv_pipe.engines.vllm.publish import Published, Publisher
from openenv_pipe.engines.vllm.server_metrics import ServerMetrics
from openenv_pipe.engines.vllm.supervisor import VllmSupervisor
from openenv_pipe.errors import EngineError, raise_first

Result = TypeVar("Result")
MOST_TRIES = 4  # of one request, whatever its servers went through


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """An adapter of made-up values, and the logprobs under it: a fresh one changes nothing, so
    that adapters are applied shows only in such a one."""

    name: str
    folder: Path
    expected: np.ndarray  # [P, V]


class Replica:
    """See above. Its number is its place among the servers."""

    def __init__(
        self,
        number: int,
        server: VllmServer,
        config: VllmEngineConfig,
        *,
        publisher: Publisher,
        canary: Canary,
        probe: Probe | None,
        tell: Callable[[str], None],
    ) -> None:
        self.number = number
        self.supervisor = VllmSupervisor(server, config, restore=self._restore, tell=tell)
        self.metrics = ServerMetrics(self._read_metrics)
        self.difference = 0.0  # of a logprob, at the canary's last look
        self.is_late = False  # it was down at the last publish, and does not have that yet
        self._publisher = publisher
        self._canary = canary
        self._probe = probe  # until it has been tried
        self._serving: Published | None = None  # None: what it started with
        self._is_asleep = False

    @property
    def is_up(self) -> bool:
        return self.supervisor.client is not None

    @property
    def may_play(self) -> bool:
        """Whether it samples with the last policy, or with one that is about to be replaced."""
        return self.is_up and not self.is_late

    @property
    def model(self) -> str:
        """What a request names to get its current policy."""
        return self._publisher.model(self._serving)

    async def sample(self, prompt: Sequence[int], sampling: dict[str, Any]) -> list[Sampled]:
        """One try. Raises ServerGoneError once the server answers again, or counts as dead."""

        async def ask(client: VllmClient) -> list[Sampled]:
            serving, model = self._serving, self.model
            answers = await client.generate(model, prompt, sampling)
            if model == BASE or serving is None:  # the server knows: they may be replaced under way
                return answers
            return [replace(answer, versions=[str(serving.version)]) for answer in answers]

        return await self._once(ask)

    async def send(self, published: Published) -> None:
        """Makes it the server's policy, a restarted one's if need be. Raises EngineError."""

        async def give(client: VllmClient) -> None:
            if self._is_asleep:
                await self._wake(client, published)
            else:
                await self._publisher.send(client, published, paused=False)
            self._serving = published

        await self._insist(give)

    async def sleep(self, level: int) -> None:
        """Until it is sent a policy. Raises EngineError."""

        async def lay_down(client: VllmClient) -> None:
            await client.sleep(level)
            self._is_asleep = True

        await self._insist(lay_down)

    async def check(self, when: str) -> None:
        """The canary looks. Raises TrainingError."""
        await self._insist(lambda client: self._check(client, when))

    async def close(self, *, withdraw: bool) -> None:
        """Ends the server, or leaves one that is not ours without our files."""
        await self.metrics.close()
        client = self.supervisor.client
        if withdraw and client is not None:
            with contextlib.suppress(ServerGoneError, EngineError):
                if self._is_asleep and self._serving is not None:
                    await self._wake(client, self._serving)
                await self._publisher.withdraw(client)
        await self.supervisor.close()

    async def _restore(self, client: VllmClient) -> None:
        """For a server that has just started: the first time, or instead of one that died."""
        self._is_asleep = False
        await self._publisher.clear(client)  # of one that is attached to
        probe, self._probe = self._probe, None
        if probe is not None:
            await self._try(client, probe)
        self._serving = await self._publisher.restore(client)
        while self._serving is not None:
            await self._check(client, "after the restart of the server")
            if self._serving is self._publisher.latest:
                self.is_late = False
                break
            self._serving = await self._publisher.restore(client)

    async def _wake(self, client: VllmClient, published: Published) -> None:
        """Weights need their memory before they are sent, and keys and values come last: with
        those it serves, and nothing may be sampled from what sleep has left of the weights."""
        await client.wake("weights")
        await self._publisher.send(client, published, paused=True)
        await client.wake("kv_cache")
        self._is_asleep = False

    async def _try(self, client: VllmClient, probe: Probe) -> None:
        name = f"{probe.name}-{self.number}"
        await client.load_adapter(name, probe.folder)
        try:
            await self._canary.check_probe(client, name, probe.expected)
        finally:
            await client.unload_adapter(name)

    async def _check(self, client: VllmClient, when: str) -> None:
        assert self._serving is not None
        expected_PV = self._serving.expected
        self.difference = await self._canary.check(client, self.model, expected_PV, when)

    async def _insist(self, call: Callable[[VllmClient], Awaitable[Result]]) -> Result:
        """Calls until this server, or the one that follows it, has answered."""
        cause: Exception | None = None
        for _ in range(MOST_TRIES):
            try:
                return await self._once(call)
            except ServerGoneError as error:
                cause = error
        raise EngineError(f"{MOST_TRIES} requests in a row got no answer, the last: {cause}")

    async def _once(self, call: Callable[[VllmClient], Awaitable[Result]]) -> Result:
        """A cancelled call is aborted on the server."""
        client = await self.supervisor.serving()
        try:
            return await call(client)
        except ServerGoneError:
            await self.supervisor.wait_after_failure(client)
            raise

    async def _read_metrics(self) -> str | None:
        client = self.supervisor.client
        if client is None:
            return None
        try:
            return await client.metrics_text()
        except ServerGoneError:
            return None


async def of_each(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first that fails ends the others. Raises what it failed with."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as errors:
        raise_first(errors)
