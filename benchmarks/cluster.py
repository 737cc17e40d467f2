"""Measure the environment steps per second of 1, 2 and 4 rollout workers of a Ray cluster.

The cluster is simulated: each worker has a node on this machine, and a server of `slow_echo.py`,
whose steps wait, as those of an environment that calls another service. A scripted player replies
at once. The rounds of the different numbers of workers alternate.

    PYTHONPATH=. python benchmarks/cluster.py [--workers 1 2 4] [--sessions 8] [--step-s 0.05] \\
        > benchmarks/results/cluster.md
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
from pathlib import Path

from ray.cluster_utils import Cluster

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.tasks import known_splits
from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.cluster.workers import RolloutWorkers
from openenv_pipe.system.ray_cluster import RayCluster
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Task

REPOSITORY = Path(__file__).parents[1]
STORE_BYTES = 80 * 2**20  # of each node's object store, the smallest that Ray allows
NUM_ROUNDS = 3  # after one that is not counted
EPISODES_PER_SESSION = 10
TASK = Task(id="train/0", split="train", index=0, seed=0, reset={"split": "train", "turns": 4})


class Side:
    """So many workers, and their speeds."""

    def __init__(self, address: str, num_workers: int, num_sessions: int, step_s: float) -> None:
        script = REPOSITORY / "benchmarks" / "slow_echo.py"
        self.num_workers = num_workers
        self.speeds: list[float] = []  # environment steps per second, by round
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
            host=self._workers,
            adapter=build_adapter(config.env.adapter),
            splits=await self._workers.open_splits(known_splits(config)),
            chat=chat,
            engine=ScriptedEngine(load_callable("echo.policies:perfect")),
            scorer=Scorer(config.reward, config.env.success_reward),
            workers=self._workers,
        )

    async def play(self, label: str) -> None:
        """Play a round, and note its speed."""
        num_episodes = self._workers.capacity * EPISODES_PER_SESSION
        started_s = time.perf_counter()
        (group,) = await play_groups(
            self._context, [TASK], group_size=num_episodes, temperature=1.0, seed=0, label=label
        )
        duration_s = time.perf_counter() - started_s
        assert not any(episode.failed for episode in group.episodes)
        num_steps = sum(len(episode.turns) for episode in group.episodes)
        self.speeds.append(num_steps / duration_s)

    async def close(self) -> None:
        await self._workers.close()


async def measure(address: str, given: argparse.Namespace) -> list[Side]:
    """Play the rounds of all sides in turn."""
    sides = [Side(address, number, given.sessions, given.step_s) for number in given.workers]
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
        del side.speeds[0]  # of the first round, in which the workers import what they need
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sessions", type=int, default=8, help="of each worker")
    parser.add_argument("--step-s", type=float, default=0.05)
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    options = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        for _ in range(max(given.workers)):
            cluster.add_node(num_cpus=len(given.workers), **options)
        connection = RayCluster(cluster.address)  # which all sides share
        try:
            sides = asyncio.run(measure(cluster.address, given))
        finally:
            connection.close()
    finally:
        cluster.shutdown()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("ray", "aiohttp")
    )
    command = " ".join(["python", "benchmarks/cluster.py", *sys.argv[1:]])
    print(f"# Rollout workers of a Ray cluster\n\n`{command}`\n")
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(f"{versions}; {given.sessions} sessions a worker, {given.step_s:g} s a step\n")
    print("| workers | steps/s | of linear |\n|---|---|---|")
    first = statistics.median(sides[0].speeds) / sides[0].num_workers
    for side in sides:
        speed = statistics.median(side.speeds)
        print(f"| {side.num_workers} | {speed:.0f} | {speed / side.num_workers / first:.0%} |")
    print("\nAll nodes are of one machine, so the network between machines is not measured.")


if __name__ == "__main__":
    main()
