"""One rollout worker on another node: its episodes, its questions and their answers."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import EngineCapabilities, RunConfig
from openenv_pipe.errors import PipeError, SessionError
from openenv_pipe.rollout.cluster.messages import (
    CancelOrder,
    EpisodeEnd,
    Order,
    PlayOrder,
    ReplyOrder,
    ReplyRequest,
    WorkerFacts,
)
from openenv_pipe.rollout.cluster.replies import EpisodeReplies
from openenv_pipe.rollout.cluster.worker import RolloutWorker
from openenv_pipe.system.ray_cluster import PlacedProcess, RayCluster, WorkerLostError
from openenv_pipe.types import Episode, Group, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class _Play:
    """An episode that the worker is playing."""

    episode: Episode
    replies: EpisodeReplies
    end: asyncio.Future[Episode]


class RemoteWorker:
    """Sends orders to a worker, and handles what it reports.

    Orders of the same moment go in one call, because a call costs more than an order.
    """

    facts: WorkerFacts  # after `start`

    def __init__(self, process: PlacedProcess) -> None:
        self.process = process
        self.num_free = 0  # episodes that it can play beside those that it plays
        self.num_deaths = 0  # of its environment servers
        self.is_lost = False
        self._plays: dict[int, _Play] = {}
        self._orders: list[Order] = []
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    def placed(
        cls, cluster: RayCluster, config: RunConfig, index: int, logs: Path
    ) -> "RemoteWorker":
        """Have the worker placed on a node. It starts when there is one with room."""
        assert config.cluster.type == "ray"
        process = cluster.place(
            RolloutWorker,
            *(config, index, Path.cwd(), logs),
            num_cpus=config.cluster.cpus_per_worker,
            name=f"rollout worker {index}",
        )
        return cls(process)

    async def start(self) -> None:
        """Start its environment servers. Raises HostError and ConfigError."""
        self.facts = await self.process.call("start")
        self.num_free = self.facts.capacity

    async def play(
        self,
        play: int,
        replies: EpisodeReplies,
        group: Group,
        episode: Episode,
        number: int,
        temperature: float,
        capabilities: EngineCapabilities,
    ) -> Episode:
        """Have an episode played, and return it when it has ended.

        play: an identifier that was not used before.

        Raises:
            WorkerLostError: the worker was lost before the end.
            PipeError: the error that ends the run.
        """
        end = asyncio.get_running_loop().create_future()
        self._plays[play] = _Play(episode=episode, replies=replies, end=end)
        self._send(
            PlayOrder(
                play=play,
                group=replace(group, episodes=[]),
                episode=episode,
                number=number,
                temperature=temperature,
                capabilities=capabilities,
            )
        )
        try:
            return await end
        finally:
            if self._plays.pop(play, None) is not None and not self.is_lost:
                self._send(CancelOrder(play=play))

    async def serve(self) -> WorkerLostError:
        """Handle what the worker reports until it is lost, and return the error of that."""
        while True:
            try:
                found = await self.process.call("events")
            except PipeError as error:
                lost = error if isinstance(error, WorkerLostError) else WorkerLostError(str(error))
                self.is_lost = True
                self.process.kill()  # it may be only unreachable
                self.end_all(lost)
                return lost
            self.num_deaths = found.num_deaths
            for event in found.events:
                match event:
                    case ReplyRequest():
                        self._in_background(self._answer(event))
                    case EpisodeEnd():
                        self._end(event)

    def end_all(self, error: PipeError) -> None:
        """End all episodes with an error."""
        for play in self._plays.values():
            if not play.end.done():
                play.end.set_exception(error)

    async def _answer(self, event: ReplyRequest) -> None:
        play = self._plays.get(event.play)
        if play is None:
            return
        try:
            reply = await play.replies.reply(event.request)
        except SessionError as error:
            failed = replace(play.episode, status=Status.ERROR, error=str(error))
            if not play.end.done():
                play.end.set_result(failed)
        except Exception as error:
            if not play.end.done():
                play.end.set_exception(error)
        else:
            self._send(ReplyOrder(play=event.play, reply=reply))

    def _end(self, event: EpisodeEnd) -> None:
        play = self._plays.pop(event.play, None)
        if play is None or play.end.done():
            return
        if event.error is not None:
            play.end.set_exception(event.error)
        else:
            play.end.set_result(event.episode)

    def _send(self, order: Order) -> None:
        if not self._orders:
            asyncio.get_running_loop().call_soon(self._send_orders)
        self._orders.append(order)

    def _send_orders(self) -> None:
        orders, self._orders = self._orders, []
        if not self.is_lost:
            self.process.send("take", orders)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
