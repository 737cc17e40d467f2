"""`trainer.guard` in whole runs: they go back or stop, also if they were killed in between."""

import pytest

from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted

# Its tasks come in their order, eight in each step, and from step 11 on they earn nothing.
REWARD = "def falling(episode):\n    return (episode.task.index < 80) + 0.1 * episode.member\n"
COLLAPSE = 12  # the step after which the mean over five steps has fallen far enough
RATE = 1e-3
RUN = (
    *("conf=echo", "device=cpu", "num_threads=1", "eval.baselines=false", "eval.num_tasks=1"),
    *("env.max_turns=1", "env.tasks.order=seed", "trainer.checkpoint.every=1"),
    *("trainer.steps=16", "trainer.tasks_per_step=8", "trainer.group_size=2"),
    *("trainer.optimizer.type=adamw", f"trainer.optimizer.lr={RATE}"),
    "trainer.optimizer.schedule=constant",
    "trainer.optimizer.final_lr_share=null",
    "reward.terms={falling: {type: python, target: rewards:falling, keywords: {}, weight: 1.0, "
    "per_turn: false, use: sum}}",
)


def rates(folder):
    return [record.get("lr") for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture
def folders(tmp_path):
    """Return two folders of runs, each with the module of the reward."""
    made = [tmp_path / name for name in ("whole", "killed")]
    for folder in made:
        folder.mkdir()
        (folder / "rewards.py").write_text(REWARD)
    return made


def test_a_run_goes_back_to_its_best_weights_and_is_the_same_after_kills(folders):
    """It is killed before it goes back, and after that."""
    settings = (*RUN, "trainer.guard=back")
    whole = uninterrupted(folders[0], settings, "echo")
    expected = [RATE] * COLLAPSE + [pytest.approx(RATE / 3)] * (16 - COLLAPSE)
    assert rates(whole.folder) == expected
    trial = killed_and_resumed(folders[1], settings, "echo", [(COLLAPSE, 0.0), (14, 0.0)])
    assert len(trial.kills) == 2
    assert not any(trial.codes), trial.said
    assert RunFolder.open(trial.folder).status == "finished"
    assert Result.of(trial.folder).difference(Result.of(whole.folder)) is None


def test_a_run_stops_and_says_why(folders):
    code, _, err = run(folders[0], "train", *RUN, "trainer.guard=stop")
    assert code == 0, err
    assert "alarm: The reward has fallen from 1.0" in err
    folder = folders[0] / "runs/echo/0001"
    assert len(rates(folder)) == COLLAPSE
    cause = RunFolder.open(folder).record.cause
    assert cause.startswith(f"stopped by trainer.guard=stop after step {COLLAPSE}: The reward has")
