"""Train SmolLM2-135M for a few steps in every shipped experiment: does its reward collapse?

Each experiment runs with the settings that `model=smollm2_135m` gets there, with fewer episodes a
step and small evaluations. The table compares the mean reward of the first steps, the best mean of
as many steps in a row, and that of the last ones. A reward holds if its last mean is at least 80 %
of the best one; where it does not, an alarm of `trainer.guard` has to say so. A run that the folder
has is read and not repeated.

    PYTHONPATH=. python benchmarks/pretrained.py FOLDER [--only echo,catch] [--steps 30]
        [key=value ...]
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.reports.alarm import means_of
from openenv_pipe.reports.alarms import find_alarms
from openenv_pipe.runs.run import Run

# The experiments that need nothing but this machine: no judge, no server of others, no GPU.
EXPERIMENTS = (
    "echo",
    "catch",
    "blackjack",
    "frozen_lake",
    "tic_tac_toe",
    "reasoning",
    "wordle",
    "game2048",
    "coding",
    "sums",
    "sums_tiers",
    "email_search",
)
FEW = ("trainer.tasks_per_step=4", "trainer.group_size=8", "trainer.checkpoint.every=1000")
SMALL_EVALS = ("eval.during.every=0", "eval.num_tasks=4", "eval.baselines=false")
MIN_SHARE = 0.8  # of the best mean, at the end


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How the reward of one experiment went."""

    name: str
    num_steps: int
    first: float | None  # means of the reward over WINDOW steps
    best: float | None
    last: float | None
    success: float | None  # of the last step
    alarms: Sequence[str]  # the metrics of those that the guard raised
    minutes: float

    @property
    def verdict(self) -> str:
        if self.first is None or self.best is None or self.last is None:
            return "not measured"
        if self.best - self.last <= (1 - MIN_SHARE) * abs(self.best):
            return "holds"
        return "falls, and says so" if self.alarms else "FALLS IN SILENCE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs are kept")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="names, with commas")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    rows = []
    for name in arguments.only.split(","):
        path = arguments.folder / name / "0001"
        if not path.exists():
            _train(name, arguments.folder, arguments.steps, arguments.overrides)
        rows.append(_row(name, Run(path)))
        print(_table(rows[-1:], head=len(rows) == 1), flush=True)


def _train(name: str, folder: Path, steps: int, overrides: Sequence[str]) -> None:
    command = [sys.executable, "-m", "openenv_pipe.cli.main", "train", f"conf={name}"]
    command += ["model=smollm2_135m", f"trainer.steps={steps}", *FEW, *SMALL_EVALS]
    command += [f"name={name}", f"runs_dir={folder}", *overrides]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.log"
    with path.open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        print(f"{name} ended with exit code {code}: {path}", file=sys.stderr)


def _row(name: str, run: Run) -> Row:
    steps = [step for step in run.metrics if step.get("stage") == "grpo"]
    means = means_of(steps, "reward/mean")
    return Row(
        name=name,
        num_steps=len(steps),
        first=means[0] if means else None,
        best=max(means) if means else None,
        last=means[-1] if means else None,
        success=steps[-1].get("success/rate") if steps else None,
        alarms=sorted({alarm.metric for alarm in find_alarms(steps)}),
        minutes=sum(step.get("time/step_s", 0.0) for step in run.metrics) / 60,
    )


def _table(rows: Sequence[Row], *, head: bool) -> str:
    lines = []
    if head:
        titles = (
            "| experiment | steps | first | best | last | success | alarms | minutes | verdict |"
        )
        lines = [titles, "|---" * 9 + "|"]
    for row in rows:
        numbers = [
            "–" if value is None else f"{value:.2f}"
            for value in (row.first, row.best, row.last, row.success)
        ]
        cells = [f"`{row.name}`", str(row.num_steps), *numbers, ", ".join(row.alarms) or "none"]
        lines.append(f"| {' | '.join([*cells, f'{row.minutes:.0f}', row.verdict])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
