"""The life of a server: brought up, watched, replaced when it dies, within a budget.

A server counts as up when it has generated a token and has the current policy. Whoever asks for it
while it is down waits; when it stays down, all who wait get the reason and the log's last lines.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import BASE, ServerGoneError, VllmClient
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.start_progress import StartProgress
from openenv_pipe.errors import EngineError, PipeError

POLL_S = 0.1
LOOK_LIMIT_S = 10.0  # a server that is silent that long after a broken request is replaced
FIRST_PROMPT = [1, 2, 3]


class ServerLife:
    """One server at a time, and the client of the one that is up."""

    def __init__(
        self,
        server: VllmServer,
        config: VllmEngineConfig,
        *,
        restore: Callable[[VllmClient], Coroutine[Any, Any, None]],
        tell: Callable[[str], None],
    ) -> None:
        """`restore` gives a server that has just started the policy it is to serve."""
        self.num_restarts = 0
        self._server = server
        self._config = config
        self._restore = restore
        self._tell = tell
        self._client: VllmClient | None = None
        self._up = asyncio.Event()  # or it will never be up: see `_failure`
        self._failure: Exception | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The first start. Raises EngineError, ConfigError or TrainingError."""
        try:
            await self._bring_up()
        except BaseException:
            await self.close()
            raise
        self._up.set()
        self._watcher = asyncio.create_task(self._watch())

    async def serving(self) -> VllmClient:
        """The client of a server that is up. Raises what put an end to it."""
        await self._up.wait()
        if self._failure is not None:
            raise self._failure
        assert self._client is not None
        return self._client

    @property
    def client(self) -> VllmClient | None:
        """That of a server that is up now, None while there is none."""
        return self._client if self._up.is_set() and self._failure is None else None

    @property
    def failure(self) -> Exception | None:
        """Why there will be none any more."""
        return self._failure

    async def look_after(self, client: VllmClient) -> None:
        """A request of this client broke: returns when its server answers, or counts as dead.

        One that lives and says nothing is ended, so that it is replaced.
        """
        deadline = time.monotonic() + LOOK_LIMIT_S
        while self._client is client and self._up.is_set() and self._failure is None:
            if await client.is_healthy(POLL_S * 10):
                return
            if time.monotonic() > deadline:
                await self._server.stop()
                deadline = time.monotonic() + LOOK_LIMIT_S
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Ends the watch and the server, if it is ours."""
        if self._watcher is not None:
            self._watcher.cancel()
            # Whatever ended it, which `serving` tells: the server has to be ended too.
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._drop_client()
        await self._server.stop()

    async def _watch(self) -> None:
        try:
            while True:
                cause = await self._server.died()
                self._up.clear()
                await self._revive(EngineError(f"the server died ({cause})", self._server.log))
                self._up.set()
        except PipeError as error:
            self._failure = error
        except Exception as error:  # or those who wait would wait for ever
            self._failure = EngineError(f"the server cannot be watched: {error!r}")
            raise
        finally:
            self._up.set()

    async def _revive(self, error: EngineError) -> None:
        """Starts a dead server again. Raises EngineError when the restarts are used up."""
        while self.num_restarts < self._config.max_restarts:
            self.num_restarts += 1
            self._tell(
                f"{str(error).splitlines()[0]}; "
                f"restart {self.num_restarts} of {self._config.max_restarts}"
            )
            try:
                await self._drop_client()
                await self._server.stop()
                await self._bring_up()
                return
            except EngineError as failed_start:
                error = failed_start
        raise EngineError(
            f"engine.max_restarts={self._config.max_restarts} are used up: {error}"
        ) from error

    async def _bring_up(self) -> None:
        """Start, wait for a token, hand over the policy."""
        await self._server.start()
        client = VllmClient(
            self._server.url,
            api_key=self._config.api_key,
            request_timeout_s=self._config.request_timeout_s,
        )
        self._client = await client.__aenter__()
        death = asyncio.create_task(self._server.died())
        progress = StartProgress(self._server.log, self._tell)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._before(death, self._first_token(client, progress))
            await self._before(death, self._restore(client))  # may wait for the learner
            self._tell(f"ready at {self._server.url} after {progress.elapsed_s:.0f} s")
        except TimeoutError:
            raise EngineError(
                f"no token from {self._server.url} within engine.start_timeout_s="
                f"{self._config.start_timeout_s:g}",
                self._server.log,
            ) from None
        except ServerGoneError as error:
            raise EngineError(f"the server went away: {error}", self._server.log) from error
        finally:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)

    async def _before(self, death: asyncio.Task[str], step: Coroutine[Any, Any, None]) -> None:
        """A step of the start. Raises EngineError if the server dies first."""
        doing = asyncio.create_task(step)
        try:
            await asyncio.wait({death, doing}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise EngineError(
                    f"the server died before it was ready ({death.result()})", self._server.log
                )
            doing.result()
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _first_token(self, client: VllmClient, progress: StartProgress) -> None:
        self._tell(f"waiting for {self._server.url}")
        while not await client.is_healthy(5.0):
            progress.look()
            await asyncio.sleep(POLL_S)
        progress.look()
        await client.resume()  # an attached one may be as a killed run left it
        # A server can be healthy and die of its first request: it is up when it has answered one.
        await client.generate(BASE, FIRST_PROMPT, {"max_tokens": 1, "temperature": 1.0, "seed": 0})

    async def _drop_client(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
