"""Run folders that an earlier version wrote (`tests/old_runs/`) still open, resume and compare.

They have no signature, so what runs them needs `--trust`.

echo/0001   finished, 4 steps
echo/0002   interrupted, with groups played ahead of the learner
smoke/0001  interrupted; its reward terms have `use: mean` together with `per_turn: true`
"""

import json
import shutil
from pathlib import Path

import pytest

from openenv_pipe.runs.checkpoints import all_checkpoints
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run

OLD_RUNS = Path(__file__).parents[1] / "old_runs"


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder whose `runs/` holds copies of the old runs."""
    shutil.copytree(OLD_RUNS, tmp_path / "runs", symlinks=True)
    return tmp_path


def read_all(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize(("name", "steps"), [("echo/0001", 5), ("echo/0002", 6), ("smoke/0001", 6)])
def test_an_old_run_resumes_to_its_end(home, name, steps):
    folder = home / "runs" / name
    before = read_all(folder / "metrics.jsonl")
    steps_before = [record["step"] for record in read_metrics(folder / "metrics.jsonl")]
    code, _, err = run(
        home, "train", "--resume", f"runs/{name}", "--trust", f"trainer.steps={steps}"
    )
    assert code == 0, err
    resumed = RunFolder.open(folder)
    assert resumed.status == "finished"
    after = read_all(folder / "metrics.jsonl")
    assert after[: len(before)] == before, "what was there stays as it was"
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [
        *steps_before,
        *range(steps_before[-1] + 1, steps + 1),
    ]


def test_a_mean_that_was_credited_turn_by_turn_is_read_as_the_sum():
    """Turns were credited with their own values, so training goes on in the same way."""
    config = RunFolder.open(OLD_RUNS / "smoke/0001").written_config
    terms = config.reward.terms
    assert (terms["consistent"].use, terms["consistent"].per_turn) == ("sum", True)
    best = config.trainer.checkpoint.best
    assert best.metric == "success/rate", "reward/mean has another scale before the resume"


def test_groups_played_ahead_by_the_old_run_are_learned_from(home):
    """The step after the checkpoint takes the groups that the checkpoint holds."""
    folder = home / "runs" / "echo/0002"
    checkpoint = all_checkpoints(folder)[-1]
    state = json.loads((checkpoint / "resume" / "order.json").read_text())
    (step,) = map(int, state["ahead"])
    ahead = read_episodes(checkpoint / "resume" / "ahead.jsonl.gz")
    resume = ("train", "--trust", "--resume", "runs/echo/0002")
    code, _, err = run(home, *resume, f"trainer.steps={step}")
    assert code == 0, err
    learned = read_episodes(episodes_path(folder, step))
    replies = [[turn.reply for turn in e.turns] for group in ahead for e in group.episodes]
    assert [[t.reply for t in e.turns] for group in learned for e in group.episodes] == replies


def test_an_old_run_is_listed_compared_and_evaluated(home):
    code, out, err = run(home, "runs")
    assert code == 0, err
    assert all(name in out for name in ("echo/0001", "echo/0002", "smoke/0001"))
    code, out, err = run(home, "compare", "runs/echo/0001", "runs/echo/0002", "--format", "json")
    assert code == 0, err
    assert "trainer.max_staleness" in out
    code, _, err = run(home, "eval", "--trust", "runs/echo/0001", "eval.num_tasks=2")
    assert code == 0, err
