"""The connection to a Ray cluster, and Ray's errors in words. Only this file imports ray.

Ray is an optional package (the extra `ray`), which is imported when a connection is opened.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.system.optional_packages import how_to_install
from openenv_pipe.system.ray_join import answers, join

SHUTDOWN_LIMIT_S = 15.0
HEAD_CHECK_S = 3.0
PLACE_AGAIN_S = 1.0  # after which a process that was lost before it ran is placed again
NUM_FAILED_CHECKS = 3  # after which the head counts as lost
# When a process ends, Ray would kill its direct children only. These are the guardians of
# `process.py`, which end whole trees as soon as their parent is gone, and so must survive it.
SPARES_GUARDIANS = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
_log = logging.getLogger(__name__)
_connecting = threading.Lock()
_users: "list[RayCluster]" = []  # of the process's one connection, if this module has opened it


class WorkerLostError(FailureError):
    """A process that Ray had placed on a node is gone, with its node or without."""


def require_ray() -> None:
    """Check that ray is installed, without the seconds of its import. Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"cluster=ray needs the package ray; {how_to_install('ray')}")


class RayCluster:
    """A connection to a running cluster: places processes on its nodes and calls them.

    All of a process share one connection. Whatever was placed ends when the last of them is closed,
    or this process is gone.
    """

    def __init__(self, address: str) -> None:
        """address: host:port, or auto. Blocks for some seconds. Raises HostError, ConfigError."""
        require_ray()
        import ray

        self._ray = ray
        with _connecting:
            is_open = ray.is_initialized()
            if not is_open:
                # In the main thread, Ray would replace the handler of SIGTERM.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(join, ray, address).result()
            if _users or not is_open:
                _users.append(self)
        self.head: str = ray.get_runtime_context().gcs_address

    def place(
        self,
        kind: type,
        *arguments: Any,
        num_cpus: float,
        num_gpus: float = 0.0,
        elsewhere: bool = False,
        name: str,
    ) -> "PlacedProcess":
        """Start an object of an asynchronous class in a process of its own, on any node.

        The process starts as soon as a node has the free cores and GPUs.

        elsewhere: not on this process's own node. name: for messages.
        """
        actor = self._ray.remote(kind).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            label_selector=self._other_nodes() if elsewhere else None,
            runtime_env=SPARES_GUARDIANS,
            scheduling_strategy="SPREAD",
            max_concurrency=1000,
            max_restarts=0,
            max_task_retries=0,
        )
        return PlacedProcess(self, lambda: actor.remote(*arguments), name)

    def reserve(self, num_nodes: int, *, num_cpus: float, num_gpus: float) -> "Reservation":
        """Ask for cores and GPUs on each of several nodes other than this process's own.

        An autoscaler may have to add the nodes, so see `Reservation.is_ready`.
        """
        from ray.util.placement_group import placement_group

        wanted = {"CPU": num_cpus, "GPU": num_gpus}
        group = placement_group(
            [{name: number for name, number in wanted.items() if number}] * num_nodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[self._other_nodes()] * num_nodes,
        )
        return Reservation(self, group)

    def _other_nodes(self) -> dict[str, str]:
        return {"ray.io/node-id": f"!{self._ray.get_runtime_context().get_node_id()}"}

    async def wait_for_node(
        self, process: "PlacedProcess", timeout_s: float, *, needs: str, advice: str
    ) -> str:
        """Wait until a process runs, and return its method `node`: the name of its node.

        For some seconds Ray does not know that a node is lost, and may place a process there, which
        never runs. Such a process is placed again.

        Args:
            needs: what it needs there, in words.
            advice: the keys that would need less.

        Raises:
            HostError: it did not run within `cluster.start_timeout_s`, which is `timeout_s`.
        """
        lost = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return str(await process.call("node"))
                    except WorkerLostError as error:
                        lost = f". Before that, {error}"
                    await asyncio.sleep(PLACE_AGAIN_S)
                    process.place_again()
        except TimeoutError:
            free = await asyncio.to_thread(self.free_resources)
            raise HostError(
                f"{process.name} found no node within cluster.start_timeout_s={timeout_s:g}: it "
                f"needs {needs}, and {free}; add nodes, or lower {advice}{lost}"
            ) from None

    def own_address(self) -> str:
        """Return the address of this process's node, as other nodes reach it."""
        own_node = self._ray.get_runtime_context().get_node_id()
        return next(
            str(node["NodeManagerAddress"])
            for node in self._ray.nodes()
            if node["NodeID"] == own_node
        )

    def run_all(
        self, function: Callable[[int], None], num_calls: int, *, num_cpus: float, num_gpus: float
    ) -> dict[int, str]:
        """Call the function with 0, 1, ..., each in a process on any node that has room for it.

        The function raises nothing. A call whose process or node is lost is not repeated.

        Returns:
            The errors of lost calls, by their numbers.

        Raises:
            HostError: the cluster's head is lost.
        """
        task = self._ray.remote(_call_in_folder).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            runtime_env=SPARES_GUARDIANS,
            max_retries=0,
            scheduling_strategy="SPREAD",
        )
        waiting = {task.remote(Path.cwd(), function, number): number for number in range(num_calls)}
        lost: dict[int, str] = {}
        num_failed = 0
        while waiting:
            done, _ = self._ray.wait(list(waiting), timeout=HEAD_CHECK_S)
            for each in done:
                number = waiting.pop(each)
                try:
                    self._ray.get(each)
                except self._ray.exceptions.RayError as error:
                    lost[number] = _in_a_line(error)
            num_failed = 0 if done or self._head_answers() else num_failed + 1
            if num_failed == NUM_FAILED_CHECKS:
                raise self._head_lost("sweep")
        return lost

    def free_resources(self) -> str:
        """Return in words which cores and GPUs are free, for messages."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        num_nodes = sum(node["Alive"] for node in self._ray.nodes())
        kinds = {"CPU": "cores"} | ({"GPU": "GPUs"} if "GPU" in total else {})
        numbers = [
            f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {name}"
            for kind, name in kinds.items()
        ]
        return f"{' and '.join(numbers)} are free on {num_nodes} nodes"

    def num_cores(self) -> dict[str, float]:
        """Return the cores of each node that has any, free or not, by address and id."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return {
            f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"]["CPU"]
            for node in nodes
            if node["Resources"].get("CPU")
        }

    async def watch_head(self) -> HostError:
        """Wait until the cluster's head does not answer any more, and return that as an error.

        Ray itself would end this process after a minute, without a word about the run.
        """
        num_failed = 0
        while num_failed < NUM_FAILED_CHECKS:
            await asyncio.sleep(HEAD_CHECK_S)
            num_failed = 0 if await asyncio.to_thread(self._head_answers) else num_failed + 1
        return self._head_lost("run")

    def _head_answers(self) -> bool:
        host, _, port = self.head.rpartition(":")
        return answers(host.strip("[]"), int(port))

    def _head_lost(self, what: str) -> HostError:
        return HostError(
            f"the head of the Ray cluster at {self.head} does not answer any more; without it no "
            "process can be placed or replaced. Start the cluster again (`ray start --head`), "
            f"then resume the {what}"
        )

    def close(self) -> None:
        """End the connection, if no other uses it, in bounded time. Repeating it does no harm."""
        with _connecting:
            if self not in _users:
                return
            _users.remove(self)
            if not _users:  # with the lock, or another would take the connection that ends
                _call_in_bounded_time(self._ray.shutdown)


async def connected(address: str) -> RayCluster:
    """Join a cluster without blocking the event loop. A cancellation leaves no connection."""
    making = ThreadPoolExecutor(1)
    connecting = making.submit(RayCluster, address)
    making.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unwanted)
        raise


class PlacedProcess:
    """A process that Ray has placed, or will place, on a node."""

    def __init__(self, cluster: RayCluster, place: Callable[[], Any], name: str) -> None:
        """place: has Ray place the process, and returns Ray's handle of it."""
        self.name = name
        self._ray = cluster._ray
        self._place = place
        self._actor = place()

    def place_again(self) -> None:
        """Have another process placed instead of this one, which is lost."""
        self._actor = self._place()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process and return its result.

        Raises:
            WorkerLostError: the process is gone, or cannot be reached.
            PipeError: as the method; another error of the method is raised as FailureError.
        """
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except self._ray.exceptions.RayError as error:
            raise self._as_pipe_error(error) from None

    def begin(self, method: str, *arguments: Any) -> "PlacedCall":
        """Call a method in the process, without waiting for its end."""
        return PlacedCall(self, getattr(self._actor, method).remote(*arguments))

    def kill(self) -> None:
        """End the process at once, wherever it is."""
        try:
            self._ray.kill(self._actor, no_restart=True)
        except Exception as error:  # the head may be gone, and the process with it
            _log.debug("%s cannot be killed: %s", self.name, error)

    def _as_pipe_error(self, error: Exception) -> FailureError | ConfigError:
        """Return a method's own error if it is the package's; else one that says what failed."""
        if getattr(error, "actor_init_failed", False):  # it would fail on any node
            reason = str(error).strip().splitlines()[-1]
            return HostError(
                f"{self.name} cannot be made: {reason}; every node needs the same versions of "
                "Python, Ray and this package, and the packages that the configuration names"
            )
        if not isinstance(error, self._ray.exceptions.RayTaskError):
            return WorkerLostError(f"{self.name} is lost: {_in_a_line(error)}")
        cause = getattr(error, "cause", None)
        if isinstance(cause, ConfigError | FailureError):
            return cause
        return FailureError(f"{self.name}: {error}")


class PlacedCall:
    """A call of a method in a placed process. All methods block."""

    def __init__(self, process: PlacedProcess, reference: Any) -> None:
        self._process = process
        self._reference = reference

    def is_over(self, timeout_s: float) -> bool:
        """Wait for the end of the call, or of the process, and return whether it came."""
        over, _ = self._process._ray.wait([self._reference], timeout=timeout_s)
        return bool(over)

    def result(self) -> Any:
        """Wait for the end, and return what the method returned. Raises as `PlacedProcess.call`."""
        try:
            return self._process._ray.get(self._reference)
        except self._process._ray.exceptions.RayError as error:
            raise self._process._as_pipe_error(error) from None


class Reservation:
    """Room for processes on several nodes (a placement group of Ray's)."""

    def __init__(self, cluster: RayCluster, group: Any) -> None:
        self._cluster = cluster
        self._group = group

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for the nodes, and return whether all have the room."""
        return bool(self._group.wait(timeout_s))

    def place(
        self, kind: type, *arguments: Any, node: int, num_cpus: float, num_gpus: float, name: str
    ) -> PlacedProcess:
        """Start an object of a class in a process on a node. Its methods run one after another.

        node: the node's number in the reservation. name: for messages.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._cluster._ray.remote(kind).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
            max_restarts=0,
            max_task_retries=0,
        )
        return PlacedProcess(self._cluster, lambda: actor.remote(*arguments), name)

    def release(self) -> None:
        """Give the room back, and end what runs there, in bounded time."""
        from ray.util.placement_group import remove_placement_group

        _call_in_bounded_time(remove_placement_group, self._group)


def _close_unwanted(connecting: "Future[RayCluster]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _call_in_bounded_time(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function of Ray's, which may wait forever where the cluster's head is lost.

    It goes on in a daemon thread, which does not keep this process, and whose errors are ignored.
    """

    def call() -> None:
        try:
            function(*arguments)
        except Exception as error:
            _log.debug("while a connection to Ray ended: %s", error)

    calling = threading.Thread(target=call, daemon=True, name="ray's end")
    calling.start()
    calling.join(SHUTDOWN_LIMIT_S)


def _in_a_line(error: Exception) -> str:
    """Return the beginning of one of Ray's errors, which have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _call_in_folder(folder: Path, function: Callable[[int], None], number: int) -> None:
    """Call a function on a node; relative paths mean the caller's files where the node has them."""
    if folder.is_dir():
        os.chdir(folder)
    function(number)
