"""Train conf=echo by RULER alone, with a scripted judge, beside training on the reward itself.

    python benchmarks/judge.py    # writes results/judge.md and docs/images/ruler.png

The judge ranks by the rules of echo, which it applies to the conversation, with an error of up to
--noise in each score. It never sees the environment's reward, and the run does not use it.
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
IMAGE = REPOSITORY / "docs" / "images" / "ruler.png"
METRIC = "reward/env"  # what the environment pays; RULER's run records it with weight 0
WINDOW = 10  # steps that a point of the curve is the mean of
# A verdict is about a whole episode of four turns, so that each turn's share of it is noisy: larger
# groups average it out, and entropy keeps the policy from settling on one letter before that.
SETTINGS = ("trainer.group_size=16", "trainer.loss.entropy_coef=0.01")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as runs,
        JudgeServer(echo_rules, noise=options.noise) as judge,
    ):
        given = [f"trainer.steps={options.steps}", f"seed={options.seed}", "eval.baselines=false"]
        given += ["num_threads=1", *SETTINGS]
        by_ruler = train(
            Path(runs) / "ruler",
            [*given, "reward=ruler", "reward.terms.ruler.max_group=16", *judge.overrides],
        )
        by_reward = train(Path(runs) / "reward", given)
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
        f"\n\n`conf=echo {' '.join(SETTINGS)}`, {options.steps} steps, seed "
        f"{options.seed}. The judge errs by up to {options.noise:g} in each score and was asked "
        f"{num_calls} times. RULER reaches {100 * share:.0f}% of the reward.\n"
    )
    print(text)
    image = "../../docs/images/ruler.png"
    (RESULTS / "judge.md").write_text(
        "# Rewards by a judge\n\n`python benchmarks/judge.py`\n\n" + text + f"\n![]({image})\n"
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
    figure.savefig(IMAGE, dpi=120)


if __name__ == "__main__":
    main()
