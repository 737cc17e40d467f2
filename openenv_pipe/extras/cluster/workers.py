"""The rollout workers of a run, seen from the process that has the engine."""

import asyncio
import itertools
import logging
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.errors import HostError, PipeError
from openenv_pipe.extras.cluster.channel import Listener
from openenv_pipe.extras.cluster.nodes import Nodes, WorkerLostError, connected
from openenv_pipe.extras.cluster.remote_worker import EpisodeReplies, RemoteWorker
from openenv_pipe.extras.cluster.schema import RayClusterConfig
from openenv_pipe.extras.cluster.worker import RolloutWorker
from openenv_pipe.rollout.context import Chat, EpisodeSpec, PlayContext
from openenv_pipe.system.child_environment import inherited_variables
from openenv_pipe.system.stop_request import end_at_once
from openenv_pipe.system.tasks import run_all
from openenv_pipe.types import Episode

WITHOUT_HEAD_S = 15.0  # Ray ends a process after 60 s, of which the checks take up to 39
CLOSE_LIMIT_S = 30.0  # for the workers' servers to stop
LOST_CLOSE_LIMIT_S = 3.0  # without the head, so that a run ends before Ray ends its process
_log = logging.getLogger(__name__)


class RolloutWorkers:
    """Plays episodes on the nodes of a Ray cluster. It is an `EpisodeLoop`.

    A worker that is lost is replaced, on any node with room, and its episodes are played again.
    """

    def __init__(self, config: RunConfig, logs: Path) -> None:
        assert isinstance(config.cluster, RayClusterConfig)
        self.capacity = 0
        self._config = config
        self._settings = config.cluster
        self._logs = logs.absolute()
        self._cluster: Nodes | None = None
        self._listener: Listener | None = None
        self._workers: list[RemoteWorker] = []
        self._chat: Chat | None = None  # of all episodes
        self._num_lost = 0
        self._num_earlier_deaths = 0  # of the environment servers of workers that were replaced
        self._failure: PipeError | None = None
        self._has_head = True
        self._has_changed = asyncio.Condition()
        self._watching: list[asyncio.Task[None]] = []
        self._play_numbers = itertools.count()

    @property
    def num_deaths(self) -> int:
        deaths = sum(worker.num_deaths for worker in self._workers)
        return self._num_lost + self._num_earlier_deaths + deaths

    @property
    def nodes(self) -> list[str]:
        return [worker.facts.node for worker in self._workers]

    def facts(self) -> dict[str, JsonValue]:
        return dict(self._workers[0].facts.host)

    async def start(self) -> None:
        settings = self._settings
        self._cluster = await connected(settings.address)
        self._watching.append(asyncio.create_task(self._watch_head(self._cluster)))
        self._listener = Listener(self._cluster.own_address())
        await self._listener.start()
        started: dict[int, RemoteWorker] = {}

        async def start(index: int) -> None:
            started[index] = await self._started(index)

        try:
            await run_all(start(index) for index in range(settings.rollout_workers))
        finally:  # `close` ends those that have started, also if another one has not
            self._workers = [started[index] for index in sorted(started)]
        self.capacity = sum(worker.facts.capacity for worker in self._workers)
        for index in range(len(self._workers)):
            self._watching.append(asyncio.create_task(self._serve_and_replace(index)))
        _log.info("%d rollout workers play on the nodes %s", len(started), ", ".join(self.nodes))

    async def open_splits(self, known: KnownSets) -> Splits:
        while True:
            worker = await self._take_place()
            try:
                splits: Splits = await worker.process.call("open_splits", known)
                return splits
            except WorkerLostError:
                worker.end()  # `_serve_and_replace` replaces it
            finally:
                worker.num_free += 1

    async def prepare(self, chat: Chat | None) -> None:
        """Send all workers what their episodes share. Call it once, before the first episode."""
        self._chat = chat
        workers = list(self._workers)
        preparing = [worker.process.call("prepare", self._chat) for worker in workers]
        results = await asyncio.gather(*preparing, return_exceptions=True)
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, WorkerLostError):
                worker.end()  # The one that replaces it is prepared when it has started.
            elif isinstance(result, BaseException):
                raise result

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        """Play an episode on the worker with the most room, and return it when it has ended.

        Raises HostError, EngineError and ConfigError.
        """
        replies = EpisodeReplies(context.engine)
        try:
            while True:
                worker = await self._take_place()
                try:
                    played = await worker.play(
                        next(self._play_numbers), replies, spec, context.engine.capabilities
                    )
                    await replies.settle()
                    return played
                except WorkerLostError as error:
                    _log.warning("%s; an episode is played again", error)
                    replies.repeat()
                finally:
                    worker.num_free += 1
                    await self._notify()
        finally:
            replies.close()

    async def close(self) -> None:
        self._failure = self._failure or HostError("the rollout workers are closed")
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S if self._has_head else LOST_CLOSE_LIMIT_S):
                closing = [worker.process.call("close") for worker in self._workers]
                await asyncio.gather(*closing, return_exceptions=True)
        for worker in self._workers:
            worker.end()
        self._workers = []
        if self._listener is not None:
            await self._listener.close()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)

    async def _started(self, index: int) -> RemoteWorker:
        """Place a worker on a node and start its servers. Raises HostError and ConfigError."""
        assert self._cluster is not None and self._listener is not None
        variables = inherited_variables(self._config.env.variables)
        process = self._cluster.place(
            RolloutWorker,
            *(self._config, index, Path.cwd(), self._logs, variables),
            num_cpus=self._settings.cpus_per_worker,
            name=f"rollout worker {index}",
        )
        worker = RemoteWorker(process, self._listener)
        try:
            await self._cluster.wait_for_node(
                process,
                self._settings.start_timeout_s,
                needs=f"cluster.cpus_per_worker={self._settings.cpus_per_worker:g}",
                advice="cluster.rollout_workers or cluster.cpus_per_worker",
            )
            await worker.start()
            if self._chat is not None:
                await process.call("prepare", self._chat)
        except BaseException:
            worker.end()
            raise
        return worker

    async def _serve_and_replace(self, index: int) -> None:
        """Serve a worker, and the ones that replace it, until the run or `max_restarts` ends."""
        try:
            while True:
                lost = await self._workers[index].serve()
                worker = await self._replacement(index, lost)
                self._num_earlier_deaths += self._workers[index].num_deaths
                self._workers[index] = worker
                await self._notify()
        except PipeError as error:
            await self._fail(error)
        except Exception as error:  # reported, or whoever waits for the worker would wait forever
            await self._fail(HostError(f"rollout worker {index} cannot be watched: {error!r}"))
            raise

    async def _replacement(self, index: int, lost: WorkerLostError) -> RemoteWorker:
        """Start a worker, and another one if it is lost meanwhile. Raises HostError."""
        while True:
            self._num_lost += 1
            _log.warning("%s", lost)
            if self._num_lost > self._settings.max_restarts:
                raise HostError(
                    f"{lost}; cluster.max_restarts={self._settings.max_restarts} are used up; "
                    "find out why workers are lost, or raise it"
                )
            try:
                return await self._started(index)
            except WorkerLostError as error:
                lost = error
            except PipeError as error:
                raise HostError(f"{lost}; it could not be replaced: {error}") from error

    async def _watch_head(self, cluster: Nodes) -> None:
        error = await cluster.watch_head()
        self._has_head = False
        await self._fail(error)
        # A run that plays ends now. One that waits for nodes or learns would not, and Ray would end
        # it without a word.
        await asyncio.sleep(WITHOUT_HEAD_S)
        end_at_once(error)

    async def _fail(self, error: PipeError) -> None:
        """End all episodes with an error, also those that would be played later."""
        self._failure = self._failure or error
        for worker in self._workers:
            worker.end_all(self._failure)
        await self._notify()

    async def _take_place(self) -> RemoteWorker:
        """Wait until a worker can play one more episode. Raises the run's failure."""
        async with self._has_changed:
            while True:
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                usable = (each for each in self._workers if not each.is_lost)
                worker = max(usable, key=lambda each: each.num_free, default=None)
                if worker is not None and worker.num_free > 0:
                    worker.num_free -= 1
                    return worker
                await self._has_changed.wait()

    async def _notify(self) -> None:
        async with self._has_changed:
            self._has_changed.notify_all()
