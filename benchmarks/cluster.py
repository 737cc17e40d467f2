"""Measure the environment steps per second of 1, 2 and 4 rollout workers of a Ray cluster.

The cluster is simulated: each worker has a node on this machine, and a server of `slow_echo.py`,
whose steps wait, as those of an environment that calls another service. A scripted policy replies
at once. The rounds of the different numbers of workers alternate. Because all share the cores of
this machine, the processor time of each kind of process is measured too.

    PYTHONPATH=. python benchmarks/cluster.py [--workers 1 2 4] [--sessions 2 4 8] \\
        [--step-s 0.05] > benchmarks/results/cluster.md
"""

import argparse
import asyncio
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.tasks import known_splits
from openenv_pipe.extras.cluster.nodes import Nodes
from openenv_pipe.extras.cluster.workers import RolloutWorkers
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Task

REPOSITORY = Path(__file__).parents[1]
STORE_BYTES = 80 * 2**20  # of each node's object store, the smallest that Ray allows
NUM_ROUNDS = 5  # after one that is not counted
EPISODES_PER_SESSION = 10
IDLE_S = 5.0
KINDS = ("workers", "servers", "run", "Ray")  # of processes
TASK = Task(id="train/0", split="train", index=0, seed=0, reset={"split": "train", "turns": 4})


class Side:
    """So many workers, their speeds and their processor time."""

    def __init__(self, address: str, num_workers: int, num_sessions: int, step_s: float) -> None:
        script = REPOSITORY / "benchmarks" / "slow_echo.py"
        self.num_workers = num_workers
        self.num_sessions = num_sessions  # of each worker
        self.speeds: list[float] = []  # environment steps per second, by round
        self.costs: list[dict[str, float]] = []  # processor seconds per step by kind, by round
        self._config = compose(
            [
                "conf=echo",
                f"env.command=['{sys.executable}','{script}','{{port}}','{step_s}']",
                f"host.sessions_per_server={num_sessions}",
                "cluster=ray",
                f"cluster.address={address}",
                f"cluster.rollout_workers={num_workers}",
            ]
        ).config

    async def start(self, logs: Path) -> None:
        config = self._config
        chat = ChatFormat(build_tokenizer())
        self._workers = RolloutWorkers(config, logs)
        await self._workers.start()
        await self._workers.prepare(chat, reads_messages=False)
        self._context = RolloutContext(
            env=config.env,
            loop=self._workers,
            splits=await self._workers.open_splits(known_splits(config)),
            chat=chat,
            engine=ScriptedEngine(load_callable("echo.policies:perfect")),
            scorer=Scorer(config.reward, config.env.success_reward),
        )

    async def play(self, label: str) -> None:
        """Play a round, and note its speed."""
        num_episodes = self._workers.capacity * EPISODES_PER_SESSION
        before, started_s = processor_times(), time.perf_counter()
        (group,) = await play_groups(
            self._context, [TASK], group_size=num_episodes, temperature=1.0, seed=0, label=label
        )
        duration_s = time.perf_counter() - started_s
        assert not any(episode.failed for episode in group.episodes)
        num_steps = sum(len(episode.turns) for episode in group.episodes)
        self.speeds.append(num_steps / duration_s)
        spent = spent_between(before, processor_times())
        self.costs.append({kind: spent[kind] / num_steps for kind in KINDS})

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def cost(self, kind: str) -> float:
        """Return the processor seconds per step."""
        return statistics.median(costs[kind] for costs in self.costs)

    async def close(self) -> None:
        await self._workers.close()


def processor_times() -> dict[int, tuple[str, float]]:
    """Return the kind and the processor seconds of each process of the benchmark, by its id."""
    own = psutil.Process()
    found = {}
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            found[process.pid] = (kind_of(process), times.user + times.system)
    return found


def kind_of(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "run"
    command = " ".join(process.cmdline())
    if "RolloutWorker" in command:
        return "workers"
    return "servers" if "slow_echo.py" in command else "Ray"


def spent_between(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]]
) -> Counter[str]:
    spent: Counter[str] = Counter()
    for pid, (kind, seconds) in after.items():
        spent[kind] += seconds - before.get(pid, (kind, 0.0))[1]
    return spent


async def measure(address: str, num_sessions: int, given: argparse.Namespace) -> list[Side]:
    """Play the rounds of all numbers of workers in turn."""
    sides = [Side(address, number, num_sessions, given.step_s) for number in given.workers]
    with tempfile.TemporaryDirectory() as folder:
        for number, side in enumerate(sides):
            logs = Path(folder, str(number))
            logs.mkdir()
            await side.start(logs)
        for number in range(NUM_ROUNDS + 1):
            for side in sides:
                await side.play(f"round {number}")
        for side in sides:
            await side.close()
    for side in sides:
        del side.speeds[0], side.costs[0]  # of the first round, in which workers import modules
    return sides


async def idle_cores() -> float:
    """Return how many cores the cluster's own processes take while nothing is played."""
    before = processor_times()
    await asyncio.sleep(IDLE_S)
    return spent_between(before, processor_times())["Ray"] / IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sessions", type=int, nargs="+", default=[2, 4, 8], help="of a worker")
    parser.add_argument("--step-s", type=float, default=0.05)
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    options = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        for _ in range(max(given.workers)):
            cluster.add_node(num_cpus=len(given.workers), **options)
        connection = Nodes(cluster.address)  # which all sides share
        try:
            idle = asyncio.run(idle_cores())
            blocks = [
                asyncio.run(measure(cluster.address, number, given)) for number in given.sessions
            ]
        finally:
            connection.close()
    finally:
        cluster.shutdown()
    print_page(blocks, idle, given)


def print_page(blocks: list[list[Side]], idle: float, given: argparse.Namespace) -> None:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("ray", "aiohttp")
    )
    command = " ".join(["python", "benchmarks/cluster.py", *sys.argv[1:]])
    print(f"# Rollout workers of a Ray cluster\n\n`{command}`\n")
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{versions}; medians of {NUM_ROUNDS} rounds. Each step waits {given.step_s:g} s in the "
        "environment's\nserver, so sessions / wait is the greatest possible speed. "
        '"of linear" compares with the speed of\none worker. The processor time of a step is that '
        "of all workers, of their environment servers, of the\nrun's process and of Ray's own "
        "processes; an episode's reset is included in it, and is not counted as a\nstep.\n"
    )
    kinds = " | ".join(f"{kind}, ms" for kind in KINDS)
    print(f"| sessions each | workers | steps/s | possible | of linear | {kinds} | cores busy |")
    print("|---" * (6 + len(KINDS)) + "|")
    for sides in blocks:
        first = sides[0].speed / sides[0].num_workers
        for side in sides:
            possible = side.num_workers * side.num_sessions / given.step_s
            costs = [side.cost(kind) for kind in KINDS]
            cells = [
                f"{side.num_sessions}",
                f"{side.num_workers}",
                f"{side.speed:.0f}",
                f"{possible:.0f}",
                f"{side.speed / side.num_workers / first:.0%}",
                *(f"{cost * 1000:.2f}" for cost in costs),
                f"{sum(costs) * side.speed:.2f}",
            ]
            print(f"| {' | '.join(cells)} |")
    print(
        f"\nWhile nothing is played, Ray's processes take {idle:.2f} cores. All nodes are of one "
        "machine with these cores:\nwhere nearly all are busy, the machine limits the speed, and "
        "not the workers. The network between\nmachines is not measured."
    )


if __name__ == "__main__":
    main()
