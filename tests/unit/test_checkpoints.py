"""Checkpoint folders: digests, which ones are kept, and rewinding a run folder to one of them."""

import json
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import run_samples

from openenv_pipe.config.diff import changed_keys
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import (
    RESUME,
    StageStep,
    all_checkpoints,
    can_resume,
    find_checkpoint,
    find_damage,
    is_resumable,
    mark_passing,
    new_checkpoint,
    newest_sound,
    point_best,
    read_best_only,
    retain,
    write_best_only,
)
from openenv_pipe.runs.episodes import episodes_path
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MetricsFile, read_metrics
from openenv_pipe.runs.record import Lineage
from openenv_pipe.runs.rewind import rewind
from openenv_pipe.runs.trained_tokens import tokens_path, write_trained_tokens


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def save(folder, step, *, stage="grpo", passing=False):
    with new_checkpoint(folder.path, StageStep(stage, step)) as path:
        (path / "weights").write_text(f"weights {stage} {step}")
        (path / RESUME).mkdir()
        (path / RESUME / "optimizer").write_text(f"optimizer {step}")
        if passing:
            mark_passing(path)
    return path.parent / StageStep(stage, step).name


def names(folder):
    return [path.name.removeprefix("step_0000") for path in all_checkpoints(folder.path)]


def tidy(folder, *, keep_last=None, num_resumable=2, best=None, measured=None):
    paths = all_checkpoints(folder.path)
    retain(
        folder.path,
        keep_last=keep_last,
        num_resumable=num_resumable,
        best=set() if best is None else {best},
        measured=dict.fromkeys(paths, 1.0) if measured is None else measured,
    )


def test_a_warm_starts_checkpoints_come_before_all_others(folder):
    save(folder, 0)
    save(folder, 30, stage="warm_start")
    save(folder, 10)
    assert [StageStep.of(path).name for path in all_checkpoints(folder.path)] == [
        *("warm_start_000030", "step_000000", "step_000010"),
    ]


@pytest.mark.parametrize("file", ["weights", "resume/optimizer", "digests.json"])
@pytest.mark.parametrize("how", ["cut off", "changed", "gone"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(folder, file, how, caplog):
    save(folder, 1)
    path = save(folder, 2) / file
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if how == "cut off" else b"x" + content[1:])
    assert newest_sound(folder.path, resumable=True).name == "step_000001"
    assert len(caplog.messages) == 1 and "step_000002" in caplog.messages[0]
    with pytest.raises(RunFolderError, match="damaged"):
        find_checkpoint(folder.path, "2")


@pytest.mark.parametrize(
    "digests", ["{}", "null", "[]", '"text"', '{"weights": 3}', '{"../weights": "0"}', '{"": "0"}']
)
def test_digests_that_name_no_file_do_not_count_as_sound(folder, digests):
    (save(folder, 1) / "digests.json").write_text(digests)
    assert "digests.json" in find_damage(folder.checkpoints()[0])
    assert newest_sound(folder.path) is None


@pytest.mark.parametrize("name", ["adapter_model.bin", "resume/more.pt", "resume/order.json"])
def test_a_file_that_libraries_would_load_is_among_those_written(folder, name):
    path = save(folder, 1)
    (path / "README.md").touch()
    assert find_damage(path) is None
    (path / name).touch()
    assert f"{name} is not among the files that were written" in find_damage(path)


@pytest.mark.parametrize(
    ("kind", "checkpoint", "may_resume"),
    [("fork", None, True), ("fork", "step_000004", False), ("recording", None, False)],
)
def test_a_fork_of_the_start_begins_anew_without_a_checkpoint(folder, kind, checkpoint, may_resume):
    made = run_samples.create(folder.path.parents[1], lineage=folder.lineage(kind, checkpoint))
    assert can_resume(made.path, made.record, "died") is may_resume


def test_a_checkpoint_is_found_by_step_best_or_as_the_last(folder):
    for step in (1, 2, 3):
        save(folder, step)
    point_best(folder.path, all_checkpoints(folder.path)[1])

    def found(which):
        return find_checkpoint(folder.path, which).name

    assert (found("1"), found("best"), found("")) == ("step_000001", "step_000002", "step_000003")
    save(folder, 9, stage="warm_start")
    assert [found(name) for name in ("step_000001", "warm_start_000009")] == [
        *("step_000001", "warm_start_000009"),
    ]
    with pytest.raises(RunFolderError, match="there are: warm_start_000009, 1, 2, 3, best"):
        found("7")


def test_the_last_ones_and_the_best_stay(folder):
    for step in range(1, 7):
        save(folder, step)
    best = all_checkpoints(folder.path)[1]
    tidy(folder, keep_last=2, best=best)
    assert names(folder) == ["02", "05", "06"]


def test_none_goes_whose_metric_is_missing(folder):
    for step in range(1, 6):
        save(folder, step)
    measured = {
        path: None if StageStep.of(path).step == 2 else 1.0 for path in folder.checkpoints()
    }
    tidy(folder, keep_last=1, measured=measured)
    assert names(folder) == ["02", "05"]


def test_old_checkpoints_keep_weights_and_lose_the_optimizer(folder):
    for step in range(1, 5):
        save(folder, step)
    tidy(folder, num_resumable=2)
    assert [is_resumable(path) for path in folder.checkpoints()] == [False, False, True, True]
    assert [find_damage(path) for path in folder.checkpoints()] == [None] * 4


def test_what_was_saved_to_go_on_from_goes_once_there_is_a_later_one(folder):
    save(folder, 4)
    save(folder, 7, passing=True)
    tidy(folder)
    assert names(folder) == ["04", "07"]
    save(folder, 8)
    tidy(folder)
    assert names(folder) == ["04", "08"]


def test_what_is_kept_as_the_best_goes_once_another_is_better(folder):
    save(folder, 4)
    for step in (5, 6):
        path = save(folder, step)
        shutil.rmtree(path / RESUME)
    write_best_only(folder.path, {"step_000005", "step_000006"})
    save(folder, 8, passing=True)
    shutil.rmtree(save(folder, 9) / RESUME)
    tidy(folder, best=all_checkpoints(folder.path)[2])
    assert names(folder) == ["04", "06", "08", "09"], "08 is the newest that can be resumed"
    assert read_best_only(folder.path) == {"step_000006"}


def test_a_best_checkpoint_without_its_part_for_a_resume_is_completed(folder):
    path = save(folder, 4)
    with pytest.raises(RunFolderError, match="exists already"):
        save(folder, 4)
    shutil.rmtree(path / RESUME)
    assert is_resumable(save(folder, 4))
    assert find_damage(path) is None and names(folder) == ["04"]


def test_a_folder_is_rewound_and_nothing_of_it_deleted(folder):
    run_samples.train(folder, num_steps=4)
    for step in (2, 4):
        save(folder, step)
        write_trained_tokens(tokens_path(episodes_path(folder.path, step)), [], [])
    (folder.path / "checkpoints" / ".step_000005.partial").mkdir()
    for half in (".run.json.x1", "eval/.start.json.x2", "episodes/.step_000005.jsonl.gz.x3"):
        (folder.path / half).write_text("{")
    with folder.metrics_path.open("a") as metrics:
        metrics.write('{"step":5,"sta')
    before = folder.metrics_path.read_text()
    rewind(folder, StageStep("grpo", 2))
    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]
    assert names(folder) == ["02"]
    assert not list(folder.path.rglob(".*"))
    episodes = [path.name for path in sorted((folder.path / "episodes").iterdir())]
    assert [name.partition(".")[0] for name in episodes] == [
        *("step_000001", "step_000002"),
        "tokens_000002",
    ]
    assert (folder.logs / "set_aside" / "episodes" / "tokens_000004.jsonl.gz").exists()
    aside = folder.logs / "set_aside"
    assert folder.metrics_path.read_text() + (aside / "metrics.jsonl").read_text() == before
    moved = {path.relative_to(aside).as_posix() for path in aside.rglob("step_*")}
    assert moved == {
        *("checkpoints/step_000004", "episodes/step_000003.jsonl.gz"),
        "episodes/step_000004.jsonl.gz",
    }
    rewind(folder, StageStep("grpo", 2))  # the state after a kill during step 2
    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]


def test_a_folder_is_rewound_to_a_place_in_the_warm_start(folder):
    metrics = MetricsFile(folder.metrics_path)
    for stage, step in [*(("warm_start", n) for n in (1, 2, 3)), ("grpo", 1)]:
        metrics.append({"stage": stage, "step": step})
    metrics.close()
    rewind(folder, StageStep("warm_start", 2))
    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]
    rewind(folder, None)
    assert read_metrics(folder.metrics_path) == []


def test_a_run_that_stopped_in_its_warm_start_is_evaluated_again_at_its_end(folder):
    """Stopped there, it has evaluated its weights as `trained`, which a resume trains further."""
    for label in ("start", "trained", "trained_greedy", "step_000000"):
        run_samples.evaluate(folder, label, 0.5)
    rewind(folder, StageStep("warm_start", 1))
    assert set(read_reports(folder.path)) == {"start", "step_000000"}
    moved = {path.name for path in (folder.logs / "set_aside" / "eval").iterdir()}
    names = ("trained", "trained_greedy")
    assert moved == {f"{name}{end}" for name in names for end in (".json", ".md", ".jsonl.gz")}
    run_samples.evaluate(folder, "trained", 0.5)
    rewind(folder, StageStep("grpo", 0))
    assert "trained" in read_reports(folder.path)


HOLD = (
    "import sys; from openenv_pipe.runs.folder import RunFolder\n"
    "with RunFolder.open(sys.argv[1]).held(): pass"
)


def test_one_at_a_time_works_on_a_folder(folder):
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    with folder.held(), folder.held():  # the same object may hold the folder twice
        rejected = subprocess.run(command, capture_output=True, text=True)
        assert "another process works in" in rejected.stderr
        again = RunFolder.open(folder.path)
        with pytest.raises(RunFolderError, match="another process works in"), again.held():
            pass
    subprocess.run(command, check=True)


def test_each_attempt_is_written_down(folder):
    folder.finish("interrupted", cause="interrupted")
    config = folder.config_to_run()
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 9})})
    changed = changed_keys(config, longer)
    assert changed == {"trainer.steps": [config.trainer.steps, 9]}
    folder.begin_attempt(
        longer, command=["openenv-pipe"], checkpoint="step_000002", changed=changed, differences=[]
    )
    again = RunFolder.open(folder.path)
    first, second = again.record.attempts
    assert (first.status, second.status, second.checkpoint) == (
        *("interrupted", "running"),
        "step_000002",
    )
    assert again.written_config.trainer.steps == 9
    assert again.logs.name == "attempt_2"
    old = json.loads((folder.path / "logs" / "attempt_1" / "config.json").read_text())
    assert old["trainer"]["steps"] == config.trainer.steps


def begin_longer(path, steps, stop_after):
    """Begin an attempt with `steps` steps; raise TimeoutError after so many files and folders."""
    folder = RunFolder.open(path)
    config = folder.config_to_run([f"trainer.steps={steps}"])
    changed = changed_keys(folder.with_template_time(folder.written_config), config)
    made = []

    def counted(write):
        def counting(*arguments, **keywords):
            result = write(*arguments, **keywords)
            made.append(arguments[0])
            if len(made) == stop_after:
                raise TimeoutError
            return result

        return counting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        folder.begin_attempt(
            config, command=["train"], checkpoint=None, changed=changed, differences=[]
        )


def stopped_after_each_write(folder, aside):
    """Copy a run folder and stop its next attempt, once after each write; return the copies."""
    copies = []
    for number in count(1):
        copies.append(aside / str(number))
        shutil.copytree(folder.path, copies[-1], symlinks=True)
        try:
            begin_longer(copies[-1], 9, number)
        except TimeoutError:
            continue
        return copies


def test_a_resume_with_other_values_that_is_stopped_at_any_write_can_be_resumed(folder, tmp_path):
    steps = folder.written_config.trainer.steps
    stopped = stopped_after_each_write(folder, tmp_path / "first")
    # One stop leaves the record of the new configuration beside the old configuration.
    (between,) = (
        each
        for each in map(RunFolder.open, stopped)
        if each.config_bytes != (each.path / "config.json").read_bytes()
    )
    again = stopped_after_each_write(between, tmp_path / "again")
    for path in [*stopped, *again]:
        begin_longer(path, 9, None)
        found = RunFolder.open(path)
        assert found.config_to_run().trainer.steps == 9
        assert json.loads((path / "config.json").read_text())["trainer"]["steps"] == 9
        changes = [each.changed for each in found.attempts if each.changed]
        assert changes == [{"trainer.steps": [steps, 9]}]


def test_a_configuration_changed_by_hand_after_a_resume_is_not_the_resumed_one(folder):
    begin_longer(folder.path, 9, None)
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace('"steps": 9', '"steps": 7'))
    with pytest.raises(RunFolderError, match=r"config\.json was changed after it was written"):
        RunFolder.open(folder.path).config_to_run()
    assert RunFolder.open(folder.path).config_to_run(trust=True).trainer.steps == 7


def test_a_lineage_hides_what_a_configuration_hides(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a secret of its own")
    changed = {"host.headers.Authorization": [None, "Bearer a secret of its own"]}
    lineage = Lineage(
        kind="fork", run="smoke/0001", path="/x", checkpoint="step_000001", changed=changed
    )
    folder = RunFolder.create(
        run_samples.config(tmp_path), overrides=[], command=[], lineage=lineage
    )
    assert "a secret" not in (folder.path / "run.json").read_text()
    assert folder.record.lineage.changed["host.headers.Authorization"][1].endswith("MY_TOKEN>")


def test_the_order_of_keys_is_kept(tmp_path):
    """Reward terms are summed in the order of their keys."""
    config = run_samples.config(tmp_path)
    terms = dict(reversed(config.reward.terms.items()))
    turned = config.model_copy(update={"reward": config.reward.model_copy(update={"terms": terms})})
    folder = RunFolder.create(turned, overrides=[], command=[])
    assert list(RunFolder.open(folder.path).written_config.reward.terms) == list(terms)
