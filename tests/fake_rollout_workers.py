"""A cluster in one process: a placed process is an object, which tests can lose."""

import asyncio

from openenv_pipe.extras.cluster.channel import connect
from openenv_pipe.extras.cluster.nodes import Nodes, WorkerLostError
from openenv_pipe.extras.cluster.worker import EpisodeEnd, Event, PlayOrder, WorkerFacts
from openenv_pipe.types import Episode, Status


class FakeWorker:
    """Stands in for a `RolloutWorker`: it ends each episode at once, unless `is_silent`."""

    def __init__(self, cluster: "FakeNodes", index: int) -> None:
        self.index = index
        self.channel = None
        self.num_deaths = 0
        self.played: list[int] = []
        self._cluster = cluster

    async def node(self):
        return f"node {self.index}"

    async def start(self):
        await self._cluster.on_start(self)
        return WorkerFacts(capacity=2, node="a node", host={})

    async def prepare(self, *_):
        pass

    async def open_splits(self, _):
        return "the splits"

    async def connect(self, offer):
        await self._cluster.on_connect(self, offer)

    async def serve(self):
        try:
            while True:
                order = await self.channel.receive()
                if isinstance(order, PlayOrder):
                    self.played.append(order.play)
                    if not self._cluster.is_silent:
                        spec = order.spec
                        episode = Episode(
                            task=spec.task, member=spec.member, seed=spec.seed, status=Status.DONE
                        )
                        self.report(EpisodeEnd(play=order.play, episode=episode))
        except EOFError:
            pass

    def report(self, event):
        self.channel.send(Event(num_deaths=self.num_deaths, event=event))

    async def close(self):
        pass


class FakePlacedProcess:
    """Stands in for a `PlacedProcess`."""

    def __init__(self, cluster: "FakeNodes", index: int, name: str) -> None:
        self.name = name
        self.is_killed = False
        self.worker = FakeWorker(cluster, index)
        self._lost = asyncio.get_running_loop().create_future()

    def lose(self):
        if not self._lost.done():
            self._lost.set_result(None)
        if self.worker.channel is not None:
            self.worker.channel.close()

    async def call(self, method, *arguments):
        if not self._lost.done():
            call = asyncio.ensure_future(getattr(self.worker, method)(*arguments))
            await asyncio.wait((call, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            call.cancel()
        raise WorkerLostError(f"{self.name} is lost: ActorDiedError")

    def kill(self):
        self.is_killed = True
        self.lose()


class FakeNodes:
    """Stands in for a `Nodes` with room for everything."""

    is_silent = False
    wait_for_node = Nodes.wait_for_node

    def __init__(self) -> None:
        self.processes: list[FakePlacedProcess] = []

    async def on_start(self, worker):
        """Is called when a worker starts."""

    async def on_connect(self, worker, offer):
        """Is called when a worker connects to the run."""
        worker.channel = await connect(offer)

    def own_address(self):
        return "127.0.0.1"

    def place(self, _, config, index, cwd, logs, inherited, *, num_cpus, name):
        self.processes.append(FakePlacedProcess(self, index, name))
        return self.processes[-1]

    async def watch_head(self):
        await asyncio.Event().wait()

    def close(self):
        pass
