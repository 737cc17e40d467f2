"""One of the engine's servers, with the version of the policy that it serves.

During a publish or a restart, servers have different versions. Completions are labelled with the
version of their server, and the logprob check compares with the logprobs of that version. The
engine repeats failed completions, on the server that `routing.py` then names.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.answers import Sampled, ServerGoneError
from openenv_pipe.engines.vllm.client import Features, VllmClient
from openenv_pipe.engines.vllm.connection import BASE, StatusError
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.logprob_check import LogprobCheck
from openenv_pipe.engines.vllm.ownership import reject_other_run
from openenv_pipe.engines.vllm.publish import Published, Publisher
from openenv_pipe.engines.vllm.server_metrics import ServerMetrics
from openenv_pipe.engines.vllm.supervisor import VllmSupervisor
from openenv_pipe.errors import EngineError
from openenv_pipe.system.foreign_text import quoted

Result = TypeVar("Result")
MAX_TRIES = 4  # of one request; each failure may mean a restart of the server


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """An adapter with made-up values, and the logprobs with it.

    It tells whether a server applies adapters at all, because an untrained one changes nothing.
    """

    name: str
    folder: Path
    expected: np.ndarray  # [P, V]


class Replica:
    """A server, its restarts and its version. `number` is its index among the servers."""

    def __init__(
        self,
        number: int,
        server: VllmServer,
        config: VllmEngineConfig,
        *,
        publisher: Publisher,
        logprob_check: LogprobCheck,
        probe: Probe | None,
        exclusive: bool,
        vocabulary_size: int,
        tell: Callable[[str], None],
    ) -> None:
        """exclusive: an attached server may not be used by other runs at the same time."""
        self.number = number
        self.supervisor = VllmSupervisor(
            server,
            config,
            restore=self._restore,
            tell=tell,
            claimant=publisher.owner if config.launch == "attach" else None,
            exclusive=exclusive,
        )
        self.metrics = ServerMetrics(self._read_metrics)
        self.difference = 0.0  # the largest of a logprob in the last check
        self.is_late = False  # it was down at the last publish and does not have that version yet
        self._publisher = publisher
        self._logprob_check = logprob_check
        self._vocabulary_size = vocabulary_size
        self._probe = probe  # None once it has been checked
        self._serving: Published | None = None  # None: the weights that the server started with
        self._is_asleep = False

    @property
    def is_up(self) -> bool:
        return self.supervisor.client is not None

    @property
    def may_play(self) -> bool:
        """True if the server may get requests: it is up and has the last published version."""
        return self.is_up and not self.is_late

    @property
    def model(self) -> str:
        """The model name with which requests get the server's current policy."""
        return self._publisher.model(self._serving)

    async def sample(
        self, prompt: Sequence[int], sampling: dict[str, Any], features: Features | None = None
    ) -> list[Sampled]:
        """Sample completions, without retries. features: the pictures in the prompt.

        Raises:
            ServerGoneError: the request failed. By then the server answers again or is known dead.
        """

        async def ask(client: VllmClient) -> list[Sampled]:
            serving, model = self._serving, self.model
            try:
                answers = await client.generate(
                    model, prompt, sampling, features, self._vocabulary_size
                )
            except StatusError as error:
                if error.status != 404 or model == BASE:
                    raise
                self.supervisor.forget()
                raise ServerGoneError(f"{client.url} has lost the adapter {model}") from error
            return [
                replace(each, versions=self._versions(each.labels, model, serving, client.url))
                for each in answers
            ]

        return await self._try_once(ask)

    def _versions(
        self, labels: Sequence[str], model: str, serving: Published | None, url: str
    ) -> list[int]:
        """Return the versions of the policy that sampled a completion.

        Raises:
            EngineError: another run's weights did, at least in part.
            ServerGoneError: weights of nobody did: the server gets the policy again.
        """
        owner, base = self._publisher.owner, self.supervisor.base_label
        try:
            if model == BASE:  # the server itself labels each token's version
                return [owner.version(label, url) for label in labels]
            for label in labels:
                if label != base:  # an adapter on other weights than those that it was checked on
                    reject_other_run(label, owner, url)
                    raise ServerGoneError(f"the base weights of {url} are {quoted(label)} now")
        except ServerGoneError:
            self.supervisor.forget()
            raise
        assert serving is not None
        return [serving.version]

    async def send(self, published: Published) -> None:
        """Publish a policy to the server, or to its replacement. Raises EngineError."""

        async def give(client: VllmClient) -> None:
            if self._is_asleep:
                await self._wake(client, published)
            else:
                await self._publisher.send(client, published, paused=False)
            self._serving = published

        await self._with_retries(give)

    async def sleep(self, level: int) -> None:
        """Put the server to sleep until the next `send`. Raises EngineError."""

        async def lay_down(client: VllmClient) -> None:
            await client.sleep(level)
            self._is_asleep = True

        await self._with_retries(lay_down)

    async def check(self, when: str) -> None:
        """Compare logprobs with the trainer's. Raises TrainingError if they differ."""
        await self._with_retries(lambda client: self._check(client, when))

    async def close(self, *, withdraw: bool) -> None:
        """Stop the server; `withdraw`: it keeps running, so remove this run's adapters from it."""
        await self.metrics.close()
        client = self.supervisor.client
        try:
            if withdraw and client is not None:
                with contextlib.suppress(ServerGoneError, EngineError):
                    if self._is_asleep and self._serving is not None:
                        await self._wake(client, self._serving)
                    await self._publisher.withdraw(client)
        finally:
            await self.supervisor.close()

    async def _restore(self, client: VllmClient) -> None:
        """Publish the current policy to a server that has just started, and check it."""
        self._is_asleep = False
        await self._publisher.clear(client)  # an attached one may have adapters of dead runs
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
        """Wake the server and send it a policy.

        The KV cache is woken last, because with it the server begins to serve requests, and none
        may be sampled from weights that sleep has dropped.
        """
        await client.wake("weights")
        await self._publisher.send(client, published, paused=True)
        await client.wake("kv_cache")
        self._is_asleep = False

    async def _try(self, client: VllmClient, probe: Probe) -> None:
        name = f"{probe.name}-{self.number}"
        await client.load_adapter(name, probe.folder)
        try:
            await self._logprob_check.check_probe(client, name, probe.expected)
        finally:
            await client.unload_adapter(name)

    async def _check(self, client: VllmClient, when: str) -> None:
        assert self._serving is not None
        expected_PV = self._serving.expected
        self.difference = await self._logprob_check.check(client, self.model, expected_PV, when)

    async def _with_retries(self, call: Callable[[VllmClient], Awaitable[Result]]) -> Result:
        """Call again until this server, or its replacement, answers. Raises EngineError."""
        cause: Exception | None = None
        for _ in range(MAX_TRIES):
            try:
                return await self._try_once(call)
            except ServerGoneError as error:
                cause = error
        raise EngineError(f"{MAX_TRIES} requests in a row got no usable answer, the last: {cause}")

    async def _try_once(self, call: Callable[[VllmClient], Awaitable[Result]]) -> Result:
        """Call once. If the call is cancelled, the server aborts the request."""
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
        except (ServerGoneError, EngineError):  # metrics of the server end no run
            return None
