"""Let a client play one episode: wait until one opens it, and record what the client does."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from openenv_pipe.client import TOKEN_VARIABLE
from openenv_pipe.config.schema import RewardConfig, RunConfig
from openenv_pipe.environments.hosts.base import SessionLender
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.clients.rollout_queue import OpenRollout, RolloutQueue
from openenv_pipe.extras.agents.gateway import Gateway, Rollout
from openenv_pipe.extras.agents.player import AgentPlayer
from openenv_pipe.extras.agents.schema import ClientAgentConfig
from openenv_pipe.rollout.context import EpisodeSpec, PlayContext
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Episode, Opening, Status

LAST_WORD_S = 2.0  # after the end of training, for clients that ask for an episode
LOOK_S = 0.1  # between two checks whether the engine or the session has failed
MAX_ERROR_LENGTH = 300  # characters of what a client reports


@asynccontextmanager
async def serving_clients(
    loop: LocalRunner,
    config: ClientAgentConfig,
    reward: RewardConfig,
    run: str,
    notify: Callable[[str], None],
) -> AsyncIterator["Clients"]:
    """Serve clients until the end of the block, and tell them when training ends.

    loop: has the sessions of their episodes.

    Raises ConfigError if the address cannot be used.
    """
    needs_reward = not any(term.replaces_reward for term in reward.terms.values())
    queue = RolloutQueue(config, run, needs_reward=needs_reward)
    token = config.token or secrets.token_urlsafe(16)
    try:
        gateway = Gateway(config.host, config.port, queue.routes, token=token)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at agent.host={config.host} agent.port={config.port}: {error}; "
            "set others"
        ) from error
    async with gateway.serving():
        if config.token is None:
            notify(f"token of this server, for clients: {token} (or set {TOKEN_VARIABLE})")
        watching = asyncio.create_task(queue.watch(notify))
        try:
            yield Clients(loop, config, gateway=gateway, queue=queue, notify=notify)
            queue.end()
            await asyncio.sleep(LAST_WORD_S)
        finally:
            watching.cancel()
            queue.close()


def open_clients(
    config: RunConfig, loop: LocalRunner, logs: Path, notify: Callable[[str], None]
) -> AbstractAsyncContextManager["Clients"]:
    """Serve the clients of `agent=client`; see `rollout.episode.own_loop`."""
    assert isinstance(config.agent, ClientAgentConfig)
    folder = logs.resolve().parents[1]
    run = f"{folder.parent.name}/{folder.name}"
    return serving_clients(loop, config.agent, config.reward, run, notify)


class Clients(LocalRunner):
    def __init__(
        self,
        loop: LocalRunner,
        config: ClientAgentConfig,
        *,
        gateway: Gateway,
        queue: RolloutQueue,
        notify: Callable[[str], None],
    ) -> None:
        super().__init__(loop.host, loop.adapter)
        self.config = config
        self.gateway = gateway
        self.queue = queue
        self._notify = notify

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        if not self.queue.has_begun:
            self._notify(f"waiting for clients at {self.gateway.url}")
        return await ClientPlayer(self, context, spec).play(self.host)


class ClientPlayer(AgentPlayer):
    """Lets a client play one episode, in place of the pipeline's own loop."""

    def __init__(self, clients: Clients, context: PlayContext, spec: EpisodeSpec) -> None:
        super().__init__(
            context, clients.adapter, spec, gateway=clients.gateway, config=clients.config
        )
        self._queue = clients.queue
        self._late = (
            f"agent.group_timeout_s={clients.config.group_timeout_s:g} had passed since the first "
            "episode of the group was opened"
        )
        self._queued = self._queue.add(spec)

    async def play(self, host: SessionLender) -> Episode:
        queued = self._queued
        try:
            await queued.until(lambda: queued.is_claimed or queued.is_late)
            self._episode.task = queued.task
            if queued.is_claimed:
                await super().play(host)
            else:
                self._episode.status = Status.CLIENT_LATE
                self._episode.error = f"no client opened it before {self._late}"
            return self._episode
        finally:
            self._queue.remove(queued, self._episode)

    async def _run(self, rollout: Rollout, opening: Opening) -> Status:
        queued, calls, steps = self._queued, rollout.calls, rollout.steps
        queued.change(rollout=OpenRollout(key=rollout.key, task=self._task(opening), steps=steps))
        await queued.until(
            lambda: bool(
                queued.report
                or queued.is_late
                or queued.is_lost
                or calls.failure is not None
                or steps.failure is not None
            ),
            LOOK_S,
        )
        report = queued.report
        if report is not None and (report.reward is not None or report.metrics):
            steps.report(report.reward, report.metrics)
        await self._conclude(rollout)
        if report is None:
            return self._unreported()
        if report.error is not None:
            said = shortened(report.error, MAX_ERROR_LENGTH)
            self._episode.error = f"the client reported a failure: {said}"
            return Status.CLIENT_FAILED
        status = self._status(rollout)
        return Status.CLIENT_FAILED if status.is_failure else status

    def _unreported(self) -> Status:
        """Return how an episode ended whose client did not report the end."""
        if self._queued.is_lost:
            self._episode.error = "its client left before it reported the end"
            return Status.CLIENT_LOST
        self._episode.error = f"its client did not report the end before {self._late}"
        return Status.CLIENT_LATE
