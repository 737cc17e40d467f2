"""One of the engine's servers: keeps it running, and gives it the policy.

A server is restarted within `engine.max_restarts` when it dies. It counts as up when it has
generated a token and has the current policy. Requests to a server that is down wait until it is up
again, or fail with the reason and the log's last lines.

During a publish or a restart, servers have different versions. Completions are labelled with the
version of their server, and the logprob check compares with the logprobs of that version. The
engine repeats failed completions, on the server that `routing.py` then names.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.answers import Sampled, ServerGoneError
from openenv_pipe.engines.vllm.client import Features, VllmClient
from openenv_pipe.engines.vllm.connection import BASE, StatusError
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.logprob_check import AdapterProbe, LogprobCheck
from openenv_pipe.engines.vllm.ownership import Claim, reject_left_weights, reject_other_run
from openenv_pipe.engines.vllm.server_log import first_error, log_size
from openenv_pipe.engines.vllm.server_metrics import ServerMetrics
from openenv_pipe.engines.vllm.transfer import PolicyVersion
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import EngineError, PipeError
from openenv_pipe.system.readiness import NotReadyError, unless_dead, wait_until_healthy
from openenv_pipe.system.supervisor import RestartBudget, Supervisor
from openenv_pipe.system.untrusted_text import quoted

Result = TypeVar("Result")
MAX_TRIES = 4  # of one request; each failure may mean a restart of the server
POLL_S = 0.1
SILENCE_LIMIT_S = 10.0  # a server that does not answer for so long after a failure is replaced
FIRST_PROMPT = [1, 2, 3]


class Replica:
    """A server, its restarts and its version of the policy.

    The engine calls `open` and `close`. `start`, `died` and `stop` make it a `RestartableServer`
    for its `Supervisor`: a start includes a first token and the current policy.
    """

    def __init__(
        self,
        number: int,
        server: VllmServer,
        config: VllmEngineConfig,
        *,
        versions: Versions,
        logprob_check: LogprobCheck,
        probe: AdapterProbe | None,
        exclusive: bool,
        vocabulary_size: int,
        notify: Callable[[str], None],
    ) -> None:
        """Prepare a replica without starting its server.

        number: its index among the servers.
        probe: is tried on the server when it starts for the first time.
        exclusive: an attached server may not be used by other runs at the same time.
        notify: receives messages for the user.
        """
        self.number = number
        self.metrics = ServerMetrics(self._read_metrics)
        self.difference = 0.0  # the largest of a logprob in the last check
        self.is_late = False  # it was down at the last publish and does not have that version yet
        self.failure: PipeError | None = None  # after which there is no further restart
        self._server = server
        self._config = config
        self._versions = versions
        self._logprob_check = logprob_check
        self._probe = probe  # None once it has been tried
        self._exclusive = exclusive
        self._vocabulary_size = vocabulary_size
        self._notify = notify
        self._client: VllmClient | None = None  # of a server that has started
        self._base_label = ""  # of the weights that the server started with
        self._serving: PolicyVersion | None = None  # None: the weights that it started with
        self._is_asleep = False
        self._forgotten = asyncio.Event()  # the server lives, and does not have the policy any more
        self._settled = asyncio.Event()  # the server is up, or its restarts are used up
        self._budget = RestartBudget(config.max_restarts, "engine.max_restarts", notify)
        self._supervisor = Supervisor(
            self,
            self._budget.restart,
            name="the server",
            error_type=EngineError,
            on_down=lambda url: self._settled.clear(),
            on_up=lambda url: self._settled.set(),
            on_failure=self._fail,
        )

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> Path | None:
        return self._server.log

    @property
    def num_restarts(self) -> int:
        return self._budget.num_used

    @property
    def client(self) -> VllmClient | None:
        """The client of the server if it is up now, otherwise None."""
        return self._client if self._settled.is_set() and self.failure is None else None

    @property
    def may_play(self) -> bool:
        """True if the server may get requests: it is up and has the last published version."""
        return self.client is not None and not self.is_late

    @property
    def model(self) -> str:
        """The model name with which requests get the server's current policy."""
        return self._serving.model if self._serving else BASE

    async def open(self) -> None:
        """Start the server for the first time, and keep it running. Raises as `start` does."""
        await self.start()
        self._settled.set()
        await self.metrics.open()
        self._supervisor.watch()

    async def close(self, *, withdraw: bool) -> None:
        """Stop the server; `withdraw`: it keeps running, so remove this run's adapters from it."""
        await self.metrics.close()
        client = self.client
        try:
            if withdraw and client is not None:
                with contextlib.suppress(ServerGoneError, EngineError):
                    if self._is_asleep and self._serving is not None:
                        await self._wake(client, self._serving)
                    await self._versions.withdraw(client)
        finally:
            await self._supervisor.stop_watching()
            await self.stop()

    async def serving(self) -> VllmClient:
        """Wait until the server is up and return its client. Raises `failure`."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        assert self._client is not None
        return self._client

    async def sample(
        self, prompt: Sequence[int], sampling: dict[str, Any], features: Features | None = None
    ) -> list[Sampled]:
        """Sample completions, without retries. features: the images in the prompt.

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
                self._forgotten.set()
                raise ServerGoneError(f"{client.url} has lost the adapter {model}") from error
            return [
                replace(each, versions=self._steps(each.labels, model, serving, client.url))
                for each in answers
            ]

        return await self._try_once(ask)

    def _steps(
        self, labels: Sequence[str], model: str, serving: PolicyVersion | None, url: str
    ) -> list[int]:
        """Return the steps of the versions that sampled a completion.

        Raises:
            EngineError: another run's weights did, at least in part.
            ServerGoneError: weights of no run did; the server gets the policy again.
        """
        owner = self._versions.owner
        try:
            if model == BASE:  # the server itself labels each token's version
                return [owner.version(label, url) for label in labels]
            for label in labels:
                # The adapter is on other weights than those that it was checked on.
                if label != self._base_label:
                    reject_other_run(label, owner, url)
                    raise ServerGoneError(f"the base weights of {url} are {quoted(label)} now")
        except ServerGoneError:
            self._forgotten.set()
            raise
        assert serving is not None
        return [serving.step]

    async def send(self, version: PolicyVersion) -> None:
        """Publish a policy to the server, or to its replacement. Raises EngineError."""

        async def give(client: VllmClient) -> None:
            if self._is_asleep:
                await self._wake(client, version)
            else:
                await self._versions.transfer.send(client, version, paused=False)
            self._serving = version

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

    async def start(self) -> None:
        """Start the server, wait for a token, and publish the policy to it.

        Raises:
            EngineError: the server died, was not ready in time, or rejected the policy.
            ConfigError, TrainingError: as `VllmServer.start`, `Claim.acquire`,
                `reject_left_weights` and the logprob check raise them.
        """
        log_begin = log_size(self.log)
        try:
            await self._start()
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"no token from {self.url} within engine.start_timeout_s="
                f"{self._config.start_timeout_s:g}",
                self.log,
            ) from None
        except (NotReadyError, ServerGoneError) as error:
            await self.stop()
            gone = "the server went away: " if isinstance(error, ServerGoneError) else ""
            parts = f"{gone}{error}", first_error(self.log, log_begin), self._server.left_out
            raise EngineError("; ".join(filter(None, parts)), self.log) from error
        except BaseException:
            await self.stop()
            raise

    async def died(self) -> str:
        """Return when the server is dead, or has forgotten the policy, with the cause in words."""
        endings = [asyncio.ensure_future(self._server.died())]
        endings.append(asyncio.ensure_future(self._was_forgotten()))
        try:
            done, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for ending in endings:
                ending.cancel()

    async def stop(self) -> None:
        """Close the client, and stop the server if the run has started it."""
        client, self._client = self._client, None
        if client is not None:
            if client.claim is not None:
                await client.claim.release()
            await client.__aexit__(None, None, None)
        await self._server.stop()

    async def _start(self) -> None:
        self._forgotten.clear()
        await self._server.start()
        client = VllmClient(
            self.url,
            api_key=self._server.key,
            request_timeout_s=self._config.request_timeout_s,
            files=self._server.files,
        )
        self._client = await client.__aenter__()
        started_s = time.monotonic()
        log = "" if self.log is None else f" (log: {self.log})"
        self._notify(f"waiting for {self.url}{log}")
        async with asyncio.timeout(self._config.start_timeout_s):
            await unless_dead(self._first_token(client), self.died())
        await unless_dead(self._restore(client), self.died())  # a broadcast waits for the learner
        self._notify(f"ready at {self.url} after {time.monotonic() - started_s:.0f} s")

    async def _first_token(self, client: VllmClient) -> None:
        await wait_until_healthy(self.url, timeout_s=math.inf, check=client.check_health)
        if not self._config.starts_servers:  # before anything changes the server for its user
            client.claim = claim = Claim(
                client,
                self._versions.owner,
                exclusive=self._exclusive,
                notify=self._notify,
                on_lost=self._fail,
                on_forgotten=self._forgotten.set,
            )
            await claim.acquire()
        await client.resume()  # a killed run may have left an attached server paused
        # A healthy server can still die at its first request.
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0}
        (sampled,) = await client.generate(BASE, FIRST_PROMPT, sampling)
        self._base_label = sampled.labels[-1]
        if self._versions.transfer.sends_adapters:
            reject_left_weights(self._base_label, self._versions.owner, self.url)

    async def _restore(self, client: VllmClient) -> None:
        """Publish the current policy to a server that has just started, and check it."""
        self._is_asleep = False
        await self._versions.transfer.clear(client)  # an attached one may have those of dead runs
        probe, self._probe = self._probe, None
        if probe is not None:
            await self._logprob_check.try_probe(client, probe, self.number)
        self._serving = await self._versions.restore(client)
        while self._serving is not None:
            await self._check(client, "after the restart of the server")
            if self._serving is self._versions.latest:
                self.is_late = False
                break
            self._serving = await self._versions.restore(client)

    async def _was_forgotten(self) -> str:
        await self._forgotten.wait()
        return "it is running, but has lost the policy: somebody else has restarted or changed it"

    async def _wake(self, client: VllmClient, version: PolicyVersion) -> None:
        """Wake the server and send it a policy.

        The KV cache is woken last, because with it the server begins to serve requests, and none
        may be sampled from weights that sleep has dropped.
        """
        await client.wake("weights")
        await self._versions.transfer.send(client, version, paused=True)
        await client.wake("kv_cache")
        self._is_asleep = False

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
        client = await self.serving()
        try:
            return await call(client)
        except ServerGoneError:
            await self._wait_after_failure(client)
            raise

    async def _wait_after_failure(self, client: VllmClient) -> None:
        """After a failed request, wait until the server answers again or counts as dead.

        A server that stays silent for `SILENCE_LIMIT_S` is stopped, so that it is replaced.
        """
        deadline = time.monotonic() + SILENCE_LIMIT_S
        while self.client is client:
            if await client.is_healthy(POLL_S * 10):
                return
            if time.monotonic() > deadline:
                await self._server.stop()
                deadline = time.monotonic() + SILENCE_LIMIT_S
            await asyncio.sleep(POLL_S)

    async def _read_metrics(self) -> str | None:
        client = self.client
        if client is None:
            return None
        try:
            return await client.metrics_text()
        except (ServerGoneError, EngineError):  # missing metrics do not end the run
            return None

    def _fail(self, error: PipeError) -> None:
        self.failure = error
        self._settled.set()
