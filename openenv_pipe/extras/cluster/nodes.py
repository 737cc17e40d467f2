"""Processes that Ray places on the nodes of a cluster, and Ray's errors in words."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.system.ray_connection import (
    HEAD_CHECK_S,
    NUM_FAILED_CHECKS,
    SPARES_GUARDIANS,
    RayConnection,
    call_in_bounded_time,
    in_a_line,
)

PLACE_AGAIN_S = 1.0  # after which a process that was lost before it ran is placed again
_log = logging.getLogger(__name__)


class WorkerLostError(FailureError):
    """A process that Ray had placed on a node is gone, with its node or without."""


class Nodes(RayConnection):
    """A connection to a running cluster: places processes on its nodes and calls them."""

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
        actor = self.ray.remote(kind).options(
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
        return {"ray.io/node-id": f"!{self.ray.get_runtime_context().get_node_id()}"}

    async def wait_for_node(
        self, process: "PlacedProcess", timeout_s: float, *, needs: str, advice: str
    ) -> str:
        """Wait until a process runs, and return the result of its method `node`: its node's name.

        For some seconds Ray does not know that a node is lost, and may place a process there, which
        never runs. Such a process is placed again.

        needs: what it needs there, in words.
        advice: the keys that would need less. Raises HostError.
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
        own_node = self.ray.get_runtime_context().get_node_id()
        return next(
            str(node["NodeManagerAddress"])
            for node in self.ray.nodes()
            if node["NodeID"] == own_node
        )

    def free_resources(self) -> str:
        """Return in words which cores and GPUs are free, for messages."""
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        num_nodes = sum(node["Alive"] for node in self.ray.nodes())
        kinds = {"CPU": "cores"} | ({"GPU": "GPUs"} if "GPU" in total else {})
        numbers = [
            f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {name}"
            for kind, name in kinds.items()
        ]
        return f"{' and '.join(numbers)} are free on {num_nodes} nodes"

    def num_cores(self) -> dict[str, float]:
        """Return the cores of each node that has any, free or not, by address and id."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        return {
            f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"]["CPU"]
            for node in nodes
            if node["Resources"].get("CPU")
        }

    async def watch_head(self) -> HostError:
        """Wait until the cluster's head no longer answers, and return that as an error.

        Ray itself would end this process after a minute, without a word about the run.
        """
        num_failed = 0
        while num_failed < NUM_FAILED_CHECKS:
            await asyncio.sleep(HEAD_CHECK_S)
            num_failed = 0 if await asyncio.to_thread(self.head_answers) else num_failed + 1
        return self.head_lost("run")


async def connected(address: str) -> Nodes:
    """Join a cluster without blocking the event loop. A cancellation leaves no connection."""
    making = ThreadPoolExecutor(1)
    connecting = making.submit(Nodes, address)
    making.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unwanted)
        raise


class PlacedProcess:
    def __init__(self, cluster: Nodes, place: Callable[[], Any], name: str) -> None:
        """place: has Ray place the process, and returns Ray's handle of it."""
        self.name = name
        self.ray = cluster.ray
        self._place = place
        self._actor = place()

    def place_again(self) -> None:
        """Have another process placed instead of this one, which is lost."""
        self._actor = self._place()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process and return its result.

        Raises WorkerLostError if the process is gone, else the method's error: one that is not a
        PipeError as a FailureError.
        """
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except self.ray.exceptions.RayError as error:
            raise self._as_pipe_error(error) from None

    def begin(self, method: str, *arguments: Any) -> "PlacedCall":
        return PlacedCall(self, getattr(self._actor, method).remote(*arguments))

    def kill(self) -> None:
        try:
            self.ray.kill(self._actor, no_restart=True)
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
        if not isinstance(error, self.ray.exceptions.RayTaskError):
            return WorkerLostError(f"{self.name} is lost: {in_a_line(error)}")
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
        """Wait up to `timeout_s` for the end of the call or the process; return whether it came."""
        over, _ = self._process.ray.wait([self._reference], timeout=timeout_s)
        return bool(over)

    def result(self) -> Any:
        try:
            return self._process.ray.get(self._reference)
        except self._process.ray.exceptions.RayError as error:
            raise self._process._as_pipe_error(error) from None


class Reservation:
    """Room for processes on several nodes (a placement group of Ray's)."""

    def __init__(self, cluster: Nodes, group: Any) -> None:
        self._cluster = cluster
        self._group = group

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`, and return whether all nodes have the reserved resources."""
        return bool(self._group.wait(timeout_s))

    def place(
        self, kind: type, *arguments: Any, node: int, num_cpus: float, num_gpus: float, name: str
    ) -> PlacedProcess:
        """Start an object of a class in a process on a node. Its methods run one after another.

        node: the node's number in the reservation. name: for messages.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._cluster.ray.remote(kind).options(
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

        call_in_bounded_time(remove_placement_group, self._group)


def _close_unwanted(connecting: "Future[Nodes]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
