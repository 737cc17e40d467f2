"""Measure what judging adds to a step: from its last episode's end to its last verdict.

    python benchmarks/judge_cost.py            # prints a table, writes results/judge_cost.md

A rollout batch has 16 groups of 4 episodes of conf=echo. A scripted judge, in a process of its own,
answers each request after --delay seconds; 16 requests may be in flight. Rollout batches with and
without the judge alternate, so that a busy machine slows both.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from openenv_pipe.config.compose import compose  # noqa: E402
from openenv_pipe.pipeline.build import assembled  # noqa: E402
from openenv_pipe.rewards import Scorer  # noqa: E402
from openenv_pipe.rollout import RolloutContext, collect_groups  # noqa: E402
from openenv_pipe.system.progress import LineProgress  # noqa: E402
from openenv_pipe.types import Group  # noqa: E402
from tests.judge_server import JudgeServer, echo_rules  # noqa: E402

RESULT = REPOSITORY / "benchmarks" / "results" / "judge_cost.md"
NUM_GROUPS, GROUP_SIZE, NUM_IN_FLIGHT = 16, 4, 16


@dataclass
class Watch:
    """A scorer that notes when the last episode of a rollout batch has ended."""

    scorer: Scorer
    played_at: float = 0.0

    @property
    def reads_messages(self) -> bool:
        return self.scorer.reads_messages

    async def score(self, group: Group) -> None:
        self.played_at = max(self.played_at, time.perf_counter())
        await self.scorer.score(group)

    def accept(self, groups: Sequence[Group]) -> None:
        self.scorer.accept(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=2.0, help="seconds of a judge's call")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(options.delay, theirs), daemon=True
    )
    server.start()
    try:
        judge = ours.recv()
        with tempfile.TemporaryDirectory() as folder:
            rows = asyncio.run(measure(judge, Path(folder), options.rounds))
    finally:
        server.terminate()
        server.join()
    write(rows, options.delay, load)


def serve(delay_s: float, connection: Connection) -> None:
    """Serve the scripted judge until the process is ended."""
    with JudgeServer(echo_rules, noise=0.02, delay_s=delay_s) as server:
        connection.send(server.overrides)
        while True:
            time.sleep(3600)


async def measure(judge: list[str], folder: Path, rounds: int) -> list[tuple[float, float, float]]:
    """Return for each round: playing without a judge, playing with it, and judging after that."""
    given = ["conf=echo", "reward=ruler", f"judge.max_concurrent={NUM_IN_FLIGHT}", *judge]
    config = compose(given).config
    rows = []
    progress = LineProgress(lambda _: None)
    parts = assembled(config, folder / "logs", [folder / "judge"], progress)
    async with parts as components:
        rollout = components.rollout
        assert rollout is not None
        without = replace(rollout, scorer=Scorer(config.reward, config.env.success_reward))
        for number in range(rounds + 1):
            alone_s, _ = await collect(without, config.seed, number)
            played_s, judged_s = await collect(rollout, config.seed, number)
            if number:  # the first round warms up
                rows.append((alone_s, played_s, judged_s))
    return rows


async def collect(rollout: RolloutContext, seed: int, number: int) -> tuple[float, float]:
    """Play a rollout batch. Return the seconds until its last episode ended, and those after it."""
    watch = Watch(rollout.scorer)  # type: ignore[arg-type]
    tasks = [rollout.splits.train[(number * NUM_GROUPS + n) % 400] for n in range(NUM_GROUPS)]
    started = time.perf_counter()
    await collect_groups(
        replace(rollout, scorer=watch),
        tasks,
        group_size=GROUP_SIZE,
        temperature=1.0,
        seed=seed,
        label=f"step {number}",
    )
    return watch.played_at - started, time.perf_counter() - watch.played_at


def write(rows: list[tuple[float, float, float]], delay_s: float, load: float) -> None:
    columns = list(zip(*rows, strict=True))
    names = (
        "playing, without a judge",
        "playing, with a judge",
        "from the last end to the verdicts",
    )
    judged_s = columns[-1]
    text = "| 64 episodes | median | range |\n|---|---|---|\n"
    for name, column in zip(names, columns, strict=True):
        text += f"| {name} | {median(column):.2f} s | {min(column):.2f} to {max(column):.2f} s |\n"
    text += (
        f"\nA call of the judge takes {delay_s:g} s, with 16 in flight. After its last episode the "
        f"step waits for {median(judged_s) / delay_s:.3f} calls (best round: "
        f"{min(judged_s) / delay_s:.3f}).\n\n{os.cpu_count()} cores, {len(rows)} rounds, load "
        f"{load:.1f} at the start.\n"
    )
    print(text)
    RESULT.write_text(
        "# What a judge adds to a step\n\n`python benchmarks/judge_cost.py`\n\n" + text
    )


if __name__ == "__main__":
    main()
