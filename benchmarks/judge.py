"""Train conf=echo by RULER alone, with a scripted judge, beside training on the reward itself.

    python benchmarks/judge.py            # prints a table, writes results/judge.md and judge.png

The judge ranks by the share of right letters, which it reads from the conversation, with an error
of up to --noise in each score. It never sees the environment's reward, and the run does not use it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.judge_server import JudgeServer, echo_rules  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"
METRIC = "reward/env"  # what the environment pays; RULER's run records it with weight 0
WINDOW = 10  # steps that a point of the curve is the mean of
LEARNING_RATE = 2.0e-3  # half of conf=echo's, with which episodes of one turn are unstable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=1, help="of an episode; conf=echo has 4")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as runs,
        JudgeServer(echo_rules, noise=options.noise) as judge,
    ):
        given = [f"trainer.steps={options.steps}", f"seed={options.seed}", "eval.baselines=false"]
        given += [f"env.tasks.{split}.reset.turns={options.turns}" for split in ("train", "eval")]
        given += [f"env.max_turns={options.turns}", f"trainer.optimizer.lr={LEARNING_RATE}"]
        by_reward = train(Path(runs) / "reward", given)
        by_ruler = train(Path(runs) / "ruler", [*given, "reward=ruler", *judge.overrides])
        num_calls = len(judge.prompts)
    write(options, by_reward, by_ruler, num_calls)


def train(runs_dir: Path, overrides: list[str]) -> tuple[list[float], float]:
    """Train; return the environment's mean reward of each step, and the success after it."""
    command = [sys.executable, "-m", "openenv_pipe.cli.main", "train", "conf=echo"]
    subprocess.run([*command, f"runs_dir={runs_dir}", *overrides], check=True, cwd=REPOSITORY)
    folder = runs_dir / "echo" / "0001"
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    curve = [row[METRIC] for row in rows if row.get("stage") == "grpo"]
    report = json.loads((folder / "eval" / "trained.json").read_text())
    return curve, report["success"]["mean"]


def write(
    options: argparse.Namespace,
    by_reward: tuple[list[float], float],
    by_ruler: tuple[list[float], float],
    num_calls: int,
) -> None:
    """Print the table, and write it with the curves."""
    rows = [
        f"| trained on | reward, last {WINDOW} steps | success of the evaluation |",
        "|---|---|---|",
    ]
    for name, (curve, success) in {"the reward": by_reward, "RULER alone": by_ruler}.items():
        rows.append(f"| {name} | {fmean(curve[-WINDOW:]):.3f} | {100 * success:.1f}% |")
    share = fmean(by_ruler[0][-WINDOW:]) / fmean(by_reward[0][-WINDOW:])
    text = "\n".join(rows) + (
        f"\n\n`conf=echo`, {options.steps} steps, seed {options.seed}, turns of an episode: "
        f"{options.turns}. The judge errs by up to {options.noise:g} in each score and was asked "
        f"{num_calls} times. RULER reaches {100 * share:.0f}% of the reward.\n\n"
        "A verdict is about a whole episode. With the four turns of `conf=echo` (`--turns 4`), "
        "where the reward is credited to each turn, RULER ends at the best constant reply.\n"
    )
    print(text)
    (RESULTS / "judge.md").write_text(
        "# Rewards by a judge\n\n`python benchmarks/judge.py`\n\n" + text + "\n![](judge.png)\n"
    )
    plot(by_reward[0], by_ruler[0])


def plot(by_reward: list[float], by_ruler: list[float]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in {"trained on the reward": by_reward, "trained by RULER": by_ruler}.items():
        smooth = [fmean(curve[max(0, n - WINDOW) : n]) for n in range(1, len(curve) + 1)]
        axes.plot(range(1, len(curve) + 1), smooth, label=name)
    axes.set(xlabel="step", ylabel="the environment's reward", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "judge.png", dpi=120)


if __name__ == "__main__":
    main()
