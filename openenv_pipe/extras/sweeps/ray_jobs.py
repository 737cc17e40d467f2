"""Jobs as tasks of a Ray cluster, on any nodes with room."""

import os
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.system.ray_connection import (
    HEAD_CHECK_S,
    NUM_FAILED_CHECKS,
    SPARES_GUARDIANS,
    RayConnection,
    in_a_line,
)


def run_on_nodes(
    cluster: RayConnection,
    function: Callable[[int], None],
    num_calls: int,
    *,
    num_cpus: float,
    num_gpus: float,
) -> dict[int, str]:
    """Call the function with 0, 1, ..., each in a process on any node that has room for it.

    The function raises nothing. A call whose process or node is lost is not repeated.

    Returns:
        The errors of lost calls, by their numbers.

    Raises:
        HostError: the cluster's head is lost.
    """
    task = cluster.ray.remote(_call_in_folder).options(
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
        done, _ = cluster.ray.wait(list(waiting), timeout=HEAD_CHECK_S)
        for each in done:
            number = waiting.pop(each)
            try:
                cluster.ray.get(each)
            except cluster.ray.exceptions.RayError as error:
                lost[number] = in_a_line(error)
        num_failed = 0 if done or cluster.head_answers() else num_failed + 1
        if num_failed == NUM_FAILED_CHECKS:
            raise cluster.head_lost("sweep")
    return lost


def _call_in_folder(folder: Path, function: Callable[[int], None], number: int) -> None:
    """Call a function on a node; relative paths mean the caller's files where the node has them."""
    if folder.is_dir():
        os.chdir(folder)
    function(number)
