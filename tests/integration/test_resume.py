"""Trap 26: a killed and resumed run equals an uninterrupted one, byte for byte."""

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.checkpoints import all_checkpoints, is_resumable
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import ended_by, servers_of
from tests.crash_matrix import (
    Reference,
    Result,
    finish,
    interrupted_twice,
    killed_and_resumed,
    make_larger,
    resumed_twice_at_once,
    start,
    uninterrupted,
)
from tests.crash_matrix import small_disk as mount_small_disk

# These settings use every part that has state: a curriculum, a reference, a schedule, several
# updates and passes per step, replayed episodes, evaluations during training, and old checkpoints
# that are removed.
RUN = (
    "conf=smoke",
    "device=cpu",
    "num_threads=1",
    "env.tasks.order=curriculum",
    "eval.baselines=false",
    "eval.during.every=2",
    "trainer.steps=4",
    "trainer.tasks_per_step=3",
    "trainer.updates_per_step=2",
    "trainer.passes_per_step=2",
    "trainer.loss.kl.coef=0.1",
    "trainer.loss.kl.refresh_every=2",
    "trainer.replay={coef: 0.5, size: 4, min_reward: null, per_step: 2}",
    "trainer.optimizer.schedule=cosine",
    "trainer.warm_start.steps=3",
    "trainer.checkpoint.every=2",
    "trainer.checkpoint.num_resumable=2",
)
BESIDE = (
    "beside.catch.conf=catch",
    "beside.catch.weight=0.5",
    "beside.catch.env.tasks.order=curriculum",
    "beside.catch.eval.num_tasks=4",
)
EVERY_STEP = "trainer.checkpoint.every_minutes=1e-9"
METRICS = "metrics.jsonl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Reference:
    """The uninterrupted run."""
    reference = uninterrupted(tmp_path_factory.mktemp("whole"), RUN, "smoke")
    records = read_metrics(reference.folder / METRICS)
    trained = [record.get("groups/trained", 0) for record in records]
    assert sum(map(bool, trained)) > 2, "the weights must change in most steps"
    assert sum(record.get("tokens/replay", 0) > 0 for record in records) > 1
    return reference


def assert_same_run(folder: Path, whole: Path) -> None:
    assert RunFolder.open(folder).status == "finished"
    assert Result.of(folder).difference(Result.of(whole)) is None


def test_killed_in_every_stage_and_resumed_until_it_ends(whole, tmp_path):
    """The run is killed in the warm start, and before and after the first checkpoint of GRPO.

    benchmarks/crash.py kills at random instants.
    """
    trial = killed_and_resumed(tmp_path, RUN, "smoke", [(1, 0.0), (4, 0.0), (6, 0.0)])
    assert len(trial.kills) == 3
    assert not any(trial.codes), trial.said
    assert_same_run(trial.folder, whole.folder)
    attempts = RunFolder.open(trial.folder).record.attempts
    assert [attempt.status for attempt in attempts[:-1]] == ["died"] * (len(attempts) - 1)
    assert (trial.folder / "logs" / "latest").resolve().name == f"attempt_{len(attempts)}"


def test_two_environments_killed_and_resumed_while_groups_are_played_ahead(
    tmp_path_factory, tmp_path
):
    """With a staleness of one version, checkpoints hold the groups that older weights played
    ahead, and the order of each environment's tasks. The killed run also saves a checkpoint by
    time after each step."""
    ahead = (*RUN, *BESIDE, "trainer.max_staleness=1", "trainer.checkpoint.every_minutes=null")
    whole = uninterrupted(tmp_path_factory.mktemp("ahead"), ahead, "smoke")
    records = read_metrics(whole.folder / METRICS)
    assert {record.get("staleness/max") for record in records} == {None, 0, 1}
    counts = [f"environment/{name}/episodes/count" for name in ("wordle", "catch")]
    played = [[record[name] for name in counts] for record in records[3:]]
    assert played == [[8, 4], [8, 4], [8, 4], [8, 4]]
    timed = (*ahead[:-1], EVERY_STEP)
    kills = [(1, 0.0), (4, 0.0), (6, 0.0)]
    trial = killed_and_resumed(tmp_path, timed, "smoke", kills)
    assert len(trial.kills) == len(kills)
    assert not any(trial.codes), trial.said
    assert_same_run(trial.folder, whole.folder)


def test_interrupted_between_checkpoints_and_resumed(whole, tmp_path):
    """Ctrl-C saves the current step; the next regular checkpoint replaces that one."""
    process, folder = start(tmp_path, *RUN), tmp_path / "smoke" / "0001"
    code = ended_by(signal.SIGINT, process, lambda: has_step(folder, 1), "the first step")
    assert code == 130, process.err
    assert all_checkpoints(folder)  # of step 1 or 2, or of a later one on a busy machine
    code, said = finish(start(tmp_path, "--resume", "latest"))
    assert code == 0, said
    assert_same_run(folder, whole.folder)


def test_interrupted_twice_and_resumed(whole, tmp_path):
    """The second Ctrl-C loses what was not saved; the resumed run plays it again."""
    trial = interrupted_twice(tmp_path, RUN, "smoke", num_lines=4)
    assert trial.codes == [130, 0], trial.said
    assert_same_run(trial.folder, whole.folder)
    assert servers_of(tmp_path) == []


def test_two_processes_resume_at_once(whole, tmp_path):
    """One of them resumes the run, and the other ends with an error and changes nothing."""
    trial = resumed_twice_at_once(tmp_path, RUN, "smoke", (4, 0.0))
    assert trial.codes == [0, 2], trial.said
    assert "another process works in" in trial.said
    assert_same_run(trial.folder, whole.folder)
    assert servers_of(tmp_path) == []


def has_step(folder: Path, step: int) -> bool:
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    return any(json.loads(line)["step"] == step for line in lines if '"grpo"' in line)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(mount_small_disk(tmp_path / "disk"))
        except PermissionError:
            pytest.skip("this user may not mount a small file system")
        yield path


def test_a_full_disk_then_a_damaged_checkpoint(whole, small_disk):
    """The run names the cause and its folder stays readable.

    With free space again it resumes, and skips a checkpoint that was truncated in between.
    """
    code, said = finish(start(small_disk, *RUN))
    assert code == 1
    assert "No space left on device" in said and "--resume" in said
    assert "Traceback" not in said
    (row,) = list_runs([small_disk])
    assert row.status in ("died", "failed")
    folder = small_disk / "smoke" / "0001"
    assert not list((folder / "checkpoints").glob(".*"))
    make_larger(small_disk)
    # A later one may have the best weights alone.
    newest = [each for each in all_checkpoints(folder) if is_resumable(each)][-1]
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, said = finish(start(small_disk, "--resume", "smoke/0001"))
    assert code == 0, said
    assert f"checkpoint {newest.name} is damaged" in said
    assert_same_run(folder, whole.folder)
    assert list((folder / "logs").glob(f"attempt_2/set_aside/checkpoints/{newest.name}"))


def test_a_fork_is_a_new_run_from_a_checkpoint(whole, tmp_path):
    """A fork starts a new run; resuming what cannot be resumed is rejected with the reason."""
    shutil.copytree(whole.folder, tmp_path / "smoke" / "0001", symlinks=True)
    code, said = finish(start(tmp_path, "--resume", "smoke/0001", "seed=5", "trainer.steps=9"))
    assert code == 2
    assert "seed: 1 -> 5" in said or "seed: 0 -> 5" in said
    code, said = finish(start(tmp_path, "--resume", "smoke/0001"))
    assert code == 2
    assert "is finished" in said
    changes = ("trainer.optimizer.lr=5e-4", "trainer.optimizer.type=muon")
    code, said = finish(start(tmp_path, "--fork", "smoke/0001@4", "trainer.steps=5", *changes))
    assert code == 0, said
    fork = RunFolder.open(tmp_path / "smoke" / "0002")
    lineage = fork.record.lineage
    assert (lineage.kind, lineage.run, lineage.checkpoint) == ("fork", "smoke/0001", "step_000004")
    assert lineage.changed["trainer.optimizer.lr"] == [0.001, 0.0005]
    assert "not taken over from the checkpoint: the optimizer" in said
    assert [path.name for path in fork.checkpoints()] == ["step_000004", "step_000005"]


def test_a_reward_that_was_edited_between_attempts_is_a_warning_of_the_report(tmp_path):
    term = (
        "{type: python, target: 'scores:score', keywords: {}, use: sum, weight: 1, per_turn: false}"
    )
    (tmp_path / "scores.py").write_text("def score(episode):\n    return 0.25\n")
    small = (
        "conf=smoke",
        "device=cpu",
        "num_threads=1",
        "eval.num_tasks=2",
        "eval.baselines=false",
    )
    words = (*small, "trainer.warm_start.steps=0", f"+reward.terms.score={term}")
    code, said = finish(start(tmp_path, *words, "trainer.steps=1"))
    assert code == 0, said
    (tmp_path / "scores.py").write_text("def score(episode):\n    return 0.5\n")
    code, said = finish(start(tmp_path, "--resume", "smoke/0001", "trainer.steps=2"))
    assert code == 0 and "evaluations of earlier attempts cannot be compared" in said, said
    report = (tmp_path / "smoke/0001/report.md").read_text()
    assert "**Warning:** since attempt 2 (from step_000001) rewards may be computed" in report
    assert "callables.scores:score was" in report
