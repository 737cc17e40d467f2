"""Compare whole training steps with TRL's: play, score, update, publish, and write the results.

Both train the same model on the same games (`end_to_end_games.py`) with the same settings
(`end_to_end_sides.py`), each in its own process, in alternation: a round is one step of each. The
first rounds are not counted. TRL plays twice, once with transformers' `generate` and once with a
rollout that keeps keys and values between turns, which is written as well as we can. `drawn` is a
game whose lengths are drawn from a seed, by default the date.

A step's memory is the most that the process held during it, minus what it held with its libraries
loaded. Only our side has a server for the environment, whose memory is not counted.

    PYTHONPATH=. python benchmarks/end_to_end.py [--cases words:64 words:512 mailbox:64 drawn:SEED]
        [--model smollm2_135m] [--precision bfloat16] [--rounds 5] [--no-stock]
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS, CACHED, STOCK = "ours", "trl-cached", "trl"
NAMES = {OURS: "openenv-pipe", CACHED: "TRL, cached rollout", STOCK: "TRL, generate"}
PACKAGES = ("torch", "transformers", "trl")
CASES = ("words:64", "words:512", "mailbox:64", f"drawn:{datetime.date.today():%Y%m%d}")
NUM_UNCOUNTED = {"tiny": 2}  # rounds, by model; of others one
TIMES = ("step, s", "rollout, s", "rest, s", "tokens/s of the rollout", "CPU s")
HEAD_CELLS = ("game: prompt tokens or seed", "", *TIMES, "memory, MB", "speedup over TRL")
Answer = dict[str, float]


class Side:
    """A training in its own process."""

    def __init__(
        self, name: str, case: str, model: str, precision: str, folder: Path, others: list[str]
    ) -> None:
        """case: the game and about how many tokens its first messages have, as in words:64."""
        script = str(HERE / "end_to_end_sides.py")
        command = [sys.executable, script, name, *case.split(":"), model, precision]
        path = [str(HERE.parent), str(HERE), str(HERE.parent / "envs")]
        self.name = name
        self._log = (folder / f"{name}-{case}.log").open("w")
        self._process = subprocess.Popen(
            [*command, str(folder / name), *(others if name == OURS else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )

    def step(self) -> Answer:
        """Let the process make a step. Raises RuntimeError if it has ended."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            log = Path(self._log.name).read_text()[-3000:]
            raise RuntimeError(f"{self.name} has ended:\n{log}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._log.close()


def measure(
    case: str, model: str, precision: str, names: list[str], num_rounds: int, others: list[str]
) -> dict[str, list[Answer]]:
    """Return the answers of each side, one for each counted round."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, case, model, precision, Path(folder), others) for name in names]
        try:
            num_uncounted = NUM_UNCOUNTED.get(model, 1)
            rounds = [
                {side.name: side.step() for side in sides}
                for _ in range(num_uncounted + num_rounds)
            ]
        finally:
            for side in sides:
                side.close()
    return {name: [each[name] for each in rounds[num_uncounted:]] for name in names}


def median(answers: list[Answer], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def row(case: str, name: str, found: dict[str, list[Answer]]) -> str:
    answers, ours = found[name], found[OURS]
    speed = statistics.median(each["num_sampled"] / each["rollout_s"] for each in answers)
    rest = statistics.median(each["step_s"] - each["rollout_s"] for each in answers)
    times = statistics.median(
        theirs["step_s"] / own["step_s"] for theirs, own in zip(answers, ours, strict=True)
    )
    cells: list[Any] = [
        case,
        NAMES[name],
        f"{median(answers, 'step_s'):.2f}",
        f"{median(answers, 'rollout_s'):.2f}",
        f"{rest:.2f}",
        f"{speed:.0f}",
        f"{median(answers, 'cpu_s'):.2f}",
        f"{median(answers, 'memory_mb'):.0f}",
        "" if name == OURS else f"{times:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help="game:prompt tokens, drawn:seed")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-stock", action="store_true", help="leave out TRL with generate")
    parser.add_argument("overrides", nargs="*", help="of our side, such as num_threads=1")
    given = parser.parse_intermixed_args()
    names = [OURS, CACHED] if given.no_stock else [OURS, CACHED, STOCK]
    packages = " ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f}, {given.precision}, python {platform.python_version()}, "
        f"{packages}\n"
    )
    print(f"| {' | '.join(HEAD_CELLS)} |\n|{'---|' * len(HEAD_CELLS)}", flush=True)
    for case in given.cases:
        found = measure(case, given.model, given.precision, names, given.rounds, given.overrides)
        for name in names:
            print(row(case, name, found), flush=True)


if __name__ == "__main__":
    main()
