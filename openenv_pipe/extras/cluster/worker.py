"""A rollout worker on one node of a cluster, and the messages between it and the run's process.

It plays the episodes that it is sent, and asks for each reply of the engine. It imports no torch.
Ray runs it as an actor, but it does not know Ray.
"""

import asyncio
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import EngineCapabilities, EnvConfig, RunConfig
from openenv_pipe.engines.base import Engine, StaticEngine
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.errors import ConfigError, FailureError, HostError, SessionError
from openenv_pipe.extras.cluster.channel import Channel, ConnectionOffer, connect
from openenv_pipe.rollout.context import Chat, EpisodeSpec
from openenv_pipe.rollout.episode import LocalLoop
from openenv_pipe.system.child_environment import adopt_variables
from openenv_pipe.types import Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayOrder:
    play: int  # identifies this attempt at the episode in all later messages
    spec: EpisodeSpec
    capabilities: EngineCapabilities  # of the engine that replies


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyOrder:
    play: int
    reply: Any  # see `engines.base`; a SessionError ends the episode


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOrder:
    play: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRequest:
    play: int
    request: Any  # see `engines.base`


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeEnd:
    play: int
    episode: Episode | None  # None: there is an error
    error: ConfigError | FailureError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    num_deaths: int  # of environment servers, since the worker's start
    event: ReplyRequest | EpisodeEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    capacity: int  # episodes that it plays at once
    node: str  # the host name
    host: dict[str, JsonValue]  # see `Host.facts`


Order = PlayOrder | ReplyOrder | CancelOrder


class RolloutWorker:
    """Plays episodes. All methods are called on one event loop."""

    def __init__(
        self, config: RunConfig, index: int, cwd: Path, logs: Path, inherited: Mapping[str, str]
    ) -> None:
        """Prepare this process.

        cwd, logs: folders of the run's machine, used where this node has them too.
        inherited: the variables that `env.variables` passes on from the run's process.
        """
        adopt_variables(inherited)
        self._config = config
        if cwd.is_dir():
            os.chdir(cwd)  # relative paths of the configuration mean the same files
        if not logs.is_dir():
            logs = Path(tempfile.mkdtemp(prefix="openenv-pipe-logs-"))
        self._loop = LocalLoop(config, build_host(config, logs / f"worker-{index}"))
        self._chat: Chat | None = None
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}  # by play
        self._channel: Channel | None = None  # after `connect`

    async def node(self) -> str:
        return platform.node()

    async def start(self) -> WorkerFacts:
        await self._loop.start()
        facts = self._loop.facts()
        return WorkerFacts(capacity=self._loop.capacity, node=platform.node(), host=facts)

    async def open_splits(self, known: KnownSets) -> Splits:
        """Complete the task sets with those that the servers list. Raises ConfigError."""
        return await self._loop.open_splits(known)

    async def prepare(self, chat: Chat | None) -> None:
        self._chat = chat

    async def connect(self, offer: ConnectionOffer) -> None:
        self._channel = await connect(offer)

    async def serve(self) -> None:
        """Follow the orders of the run's process until the connection ends."""
        assert self._channel is not None
        with suppress(EOFError):
            while True:
                self._follow(await self._channel.receive())

    def _follow(self, order: Order) -> None:
        match order:
            case PlayOrder():
                self._plays[order.play] = asyncio.create_task(self._play(order))
            case ReplyOrder():
                waiting = self._replies.pop(order.play, None)
                if waiting is None or waiting.done():
                    return
                if isinstance(order.reply, SessionError):
                    waiting.set_exception(order.reply)
                else:
                    waiting.set_result(order.reply)
            case CancelOrder():
                if (playing := self._plays.get(order.play)) is not None:
                    playing.cancel()

    async def close(self) -> None:
        for playing in self._plays.values():
            playing.cancel()
        await self._loop.close()

    async def ask(self, play: int, request: Any) -> Any:
        reply = self._replies[play] = asyncio.get_running_loop().create_future()
        self._notify(ReplyRequest(play=play, request=request))
        return await reply

    async def _play(self, order: PlayOrder) -> None:
        episode, error = None, None
        engine = _AskingEngine(self, order.play, order.capabilities)
        context = _WorkerContext(env=self._config.env, chat=self._chat, engine=engine)
        try:
            episode = await self._loop.play(context, order.spec)
        except (ConfigError, FailureError) as raised:
            error = raised
        except Exception as raised:
            error = HostError(f"a rollout worker: {type(raised).__name__}: {raised}")
        finally:
            self._plays.pop(order.play, None)
            self._replies.pop(order.play, None)
        self._notify(EpisodeEnd(play=order.play, episode=episode, error=error))

    def _notify(self, event: ReplyRequest | EpisodeEnd) -> None:
        assert self._channel is not None
        self._channel.send(Event(num_deaths=self._loop.num_deaths, event=event))


@dataclass(frozen=True, kw_only=True, slots=True)
class _WorkerContext:
    env: EnvConfig
    chat: Chat | None
    engine: Engine


class _AskingEngine(StaticEngine):
    """The engine of one episode, whose requests the run's engine answers.

    What concerns rollout batches and weights is done where the run's engine is.
    """

    max_episodes = 1

    def __init__(self, worker: RolloutWorker, play: int, capabilities: EngineCapabilities) -> None:
        self.capabilities = capabilities
        self._worker = worker
        self._play = play

    async def generate(self, request: Any) -> Any:
        return await self._worker.ask(self._play, request)
