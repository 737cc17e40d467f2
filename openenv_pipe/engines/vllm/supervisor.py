"""Keeps one vLLM server running, and restarts it within `engine.max_restarts` when it dies.

A server counts as up when it has generated a token and has the current policy. Requests to a server
that is down wait until it is up again, or fail with the reason and the log's last lines.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.ownership import Claim, Owner
from openenv_pipe.errors import EngineError, PipeError
from openenv_pipe.system.readiness import NotReadyError, unless_dead, wait_until_healthy
from openenv_pipe.system.supervisor import RestartBudget, Supervisor

POLL_S = 0.1
SILENCE_LIMIT_S = 10.0  # a server that does not answer for so long after a failure is replaced
FIRST_PROMPT = [1, 2, 3]

Restore = Callable[[VllmClient], Coroutine[Any, Any, None]]
Tell = Callable[[str], None]


class PolicyServer:
    """A `RestartableServer` whose start includes a first token and the current policy."""

    def __init__(
        self,
        server: VllmServer,
        config: VllmEngineConfig,
        restore: Restore,
        tell: Tell,
        *,
        claimant: Owner | None,
        exclusive: bool,
        on_lost: Callable[[EngineError], None],
    ) -> None:
        """claimant: the owner of the claim; None: nothing is claimed. See `ownership.Claim`."""
        self.client: VllmClient | None = None  # of a server that has started
        self.base_label = ""  # of the weights that the server started with
        self._claimant = claimant
        self._exclusive = exclusive
        self._on_lost = on_lost
        self._forgotten = asyncio.Event()  # the server lives, and does not have the policy any more
        self._server = server
        self._config = config
        self._restore = restore
        self._tell = tell

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> Path | None:
        return self._server.log

    async def start(self) -> None:
        """Start the server, wait for a token, and publish the policy to it.

        Raises:
            EngineError: the server died, was not ready in time, or refused the policy.
            ConfigError, TrainingError: as `VllmServer.start`, `Claim.acquire` and `restore`
                raise them.
        """
        try:
            await self._start()
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"no token from {self.url} within engine.start_timeout_s="
                f"{self._config.start_timeout_s:g}",
                self.log,
            ) from None
        except NotReadyError as error:
            await self.stop()
            note = self._server.left_out
            raise EngineError(f"{error}; {note}" if note else str(error), self.log) from error
        except ServerGoneError as error:
            await self.stop()
            raise EngineError(f"the server went away: {error}", self.log) from error
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

    def forget(self) -> None:
        """Take note that the server does not have the policy any more: it gets it again."""
        self._forgotten.set()

    async def stop(self) -> None:
        """Close the client, and stop the server if the run has started it."""
        client, self.client = self.client, None
        if client is not None:
            if client.claim is not None:
                await client.claim.release()
            await client.__aexit__(None, None, None)
        await self._server.stop()

    async def end(self) -> None:
        """Stop a server that does not answer, so that its death is noticed."""
        await self._server.stop()

    async def _was_forgotten(self) -> str:
        await self._forgotten.wait()
        return "it lives, but has lost the policy: somebody else has restarted or changed it"

    async def _start(self) -> None:
        self._forgotten.clear()
        await self._server.start()
        client = VllmClient(
            self.url,
            api_key=self._server.key,
            request_timeout_s=self._config.request_timeout_s,
            files=self._server.files,
        )
        self.client = await client.__aenter__()
        started_s = time.monotonic()
        log = "" if self.log is None else f" (log: {self.log})"
        self._tell(f"waiting for {self.url}{log}")
        async with asyncio.timeout(self._config.start_timeout_s):
            await unless_dead(self._first_token(client), self.died())
        await unless_dead(self._restore(client), self.died())  # a broadcast waits for the learner
        self._tell(f"ready at {self.url} after {time.monotonic() - started_s:.0f} s")

    async def _first_token(self, client: VllmClient) -> None:
        await wait_until_healthy(self.url, timeout_s=math.inf, check=client.check_health)
        if self._claimant is not None:  # before anything changes the server for its user
            client.claim = claim = Claim(
                client,
                self._claimant,
                exclusive=self._exclusive,
                tell=self._tell,
                on_lost=self._on_lost,
                on_forgotten=self.forget,
            )
            await claim.acquire()
        await client.resume()  # a killed run may have left an attached server paused
        # A healthy server can still die at its first request.
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0}
        (sampled,) = await client.generate(BASE, FIRST_PROMPT, sampling)
        self.base_label = sampled.labels[-1]


class VllmSupervisor:
    """Restarts a server when it dies, and keeps the client of the one that is up."""

    def __init__(
        self,
        server: VllmServer,
        config: VllmEngineConfig,
        *,
        restore: Restore,
        tell: Tell,
        claimant: Owner | None = None,
        exclusive: bool = False,
    ) -> None:
        """Prepare a supervisor without starting the server.

        Args:
            restore: publishes the current policy to a server that has just started.
            tell: receives messages for the user.
            claimant: the run that claims the server; None: nobody else can reach it.
            exclusive: no other run may use it meanwhile.
        """
        self._server = PolicyServer(
            server,
            config,
            restore,
            tell,
            claimant=claimant,
            exclusive=exclusive,
            on_lost=self._fail,
        )
        self._budget = RestartBudget(config.max_restarts, "engine.max_restarts", tell)
        self._supervisor = Supervisor(
            self._server,
            self._budget.restart,
            name="the server",
            error_type=EngineError,
            on_down=lambda url: self._settled.clear(),
            on_up=lambda url: self._settled.set(),
            on_failure=self._fail,
        )
        self._settled = asyncio.Event()  # the server is up, or its restarts are used up
        self._failure: PipeError | None = None

    @property
    def num_restarts(self) -> int:
        return self._budget.num_used

    @property
    def client(self) -> VllmClient | None:
        """The client of the server if it is up now, otherwise None."""
        return self._server.client if self._settled.is_set() and self._failure is None else None

    @property
    def base_label(self) -> str:
        """The label of the weights that the server started with."""
        return self._server.base_label

    def forget(self) -> None:
        """See `PolicyServer.forget`."""
        self._server.forget()

    @property
    def failure(self) -> PipeError | None:
        """The error after which there is no further restart; None before."""
        return self._failure

    async def start(self) -> None:
        """Start the server for the first time. Raises as `PolicyServer.start` does."""
        await self._server.start()
        self._settled.set()
        self._supervisor.watch()

    async def serving(self) -> VllmClient:
        """Wait until the server is up and return its client. Raises `failure`."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self._server.client is not None
        return self._server.client

    async def wait_after_failure(self, client: VllmClient) -> None:
        """After a failed request, wait until the server answers again or counts as dead.

        A server that stays silent for `SILENCE_LIMIT_S` is stopped, so that it is replaced.
        """
        deadline = time.monotonic() + SILENCE_LIMIT_S
        while self.client is client:
            if await client.is_healthy(POLL_S * 10):
                return
            if time.monotonic() > deadline:
                await self._server.end()
                deadline = time.monotonic() + SILENCE_LIMIT_S
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Stop watching, and stop the server if the run has started it."""
        await self._supervisor.stop_watching()
        await self._server.stop()

    def _fail(self, error: PipeError) -> None:
        self._failure = error
        self._settled.set()
