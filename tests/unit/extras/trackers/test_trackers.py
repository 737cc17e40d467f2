"""Trackers write what their tools' own readers read, also when a run is resumed."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.trackers.episode_table import COLUMNS, episode_rows
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.eval_report import summarise
from openenv_pipe.runs.evals import DURING, Evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.rewind import rewind
from openenv_pipe.trackers.base import TrackedStep
from openenv_pipe.trackers.build import Trackers, check_tracker
from openenv_pipe.trackers.delivery import read_state
from openenv_pipe.types import Group
from tests.fakes import made_up_episode, made_up_group, made_up_turn

HOSTILE = "<script>alert(1)</script> \x1b[31m [red]![x](http://a.example/x) \ud800 "
SUMMARY = {"eval/trained/success": 0.75}
EVALUATED = (2, 5)  # steps after which there is an evaluation


def tracked(tmp_path, name, *overrides, lineage=None, sweep=None):
    """The configuration of a run with this tracker, and its folder."""
    shipped = [f"tracker={name}", f"runs_dir={tmp_path}", *overrides]
    config = compose(["conf=smoke", *shipped]).config
    return RunFolder.create(config, overrides=[], command=[], lineage=lineage, sweep=sweep)


def hostile_group():
    turn = made_up_turn([5], [6], reply=HOSTILE + "x" * 5_000_000)
    episodes = [made_up_episode(reward, turns=[turn]) for reward in (0.0, 1.0, 0.0)]
    episodes[-1].unscored = "the judge is silent"
    return Group(id="0", task=episodes[0].task, episodes=episodes)


def attempt(folder, steps, status="finished", notify=pytest.fail, groups=()):
    """Track these steps of GRPO, and evaluations after two, as one attempt at the run does."""
    config = folder.written_config
    trackers = Trackers(config, folder, notify)
    for step in steps:
        record = {"step": step, "stage": "grpo", "reward/mean": step / 10, "loss/kl": None}
        trackers.log(record, groups)
        if step not in EVALUATED:
            continue
        group = made_up_group([step / 10])
        group.episodes[0].reward_terms = dict.fromkeys(config.reward.counted, 0.0)
        facts = {"reward": config.reward, "model": "tiny", "step": step, "temperature": 1.0}
        label = f"{DURING}{step:06d}"
        report = summarise(label, group.episodes, config.eval, config.seed, **facts)
        trackers.log_evaluation(Evaluation(report=report, groups=[group]))
    trackers.close(status, SUMMARY)


def twice(folder, name):
    """An attempt of three steps, and one that resumes after the second and ends with the fifth."""
    attempt(folder, [1, 2, 3], "interrupted", groups=[hostile_group()])
    first = read_state(folder.path, name)
    attempt(RunFolder.open(folder.path), [1, 2, 3, 4, 5])
    second = read_state(folder.path, name)
    if first is not None:
        assert (first.run_id, second.run_id) == (second.run_id, first.run_id)
        assert (first.num_records, second.num_records) == (3, 5)


# TensorBoard


def test_tensorboard_reads_each_scalar_once_texts_and_the_end_also_after_a_resumption(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tracked(tmp_path, "tensorboard")

    def check(num_steps):
        events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
        scalars = [(each.step, each.value) for each in events.Scalars("grpo/reward/mean")]
        assert scalars == [(step, pytest.approx(step / 10)) for step in range(1, num_steps + 1)]
        points = [(each.step, each.value) for each in events.Scalars("eval/during/reward")]
        evaluated = [step for step in EVALUATED if step <= num_steps]
        assert points == [(step, pytest.approx(step / 10)) for step in evaluated]
        assert events.Scalars("summary/eval/trained/success")[-1].value == 0.75
        last = {tag: events.Tensors(tag)[-1].tensor_proto for tag in events.Tags()["tensors"]}
        texts = {tag: each.string_val[0] for tag, each in last.items()}
        assert b'"max_episode_tokens"' in texts["config/text_summary"]
        assert read_state(folder.path, "tensorboard") is None  # a resumed run writes it all again
        return texts["status/text_summary"]

    attempt(folder, [1, 2, 3], "interrupted")
    assert check(3) == b"interrupted"
    rewind(folder, StageStep("grpo", 2))
    attempt(RunFolder.open(folder.path), [1, 2, 3, 4, 5])
    assert check(5) == b"finished"


# Weights & Biases


def wandb_records(path: Path):
    """The records of an offline file, which is a LevelDB log of protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last
            yield Record.FromString(whole)
            whole = b""


def wandb_attempts(folder):
    """The records of each attempt, in order, once wandb's own process has written them all."""
    import wandb

    wandb.teardown()
    files = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    return [[*wandb_records(file)] for file in files]


def found(records, kind):
    """The messages of a kind among the records."""
    return [getattr(each, kind) for each in records if each.HasField(kind)]


def values(items):
    return {".".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}


def history(records):
    """The rows with steps of GRPO, as values by name."""
    rows = [values(row.item) for row in found(records, "history")]
    return [row for row in rows if "grpo/step" in row]


def test_wandb_offline_files_hold_the_run_and_its_resumption(tmp_path):
    pytest.importorskip("wandb")
    settings = {"mode": "offline", "episodes_every": 1, "tags": "[mine]"}
    overrides = [f"tracker.wandb.{key}={value}" for key, value in settings.items()]
    folder = tracked(tmp_path, "wandb", *overrides, sweep="2026-01-01")
    twice(folder, "wandb")
    first, second = wandb_attempts(folder)
    run_ids = {found(records, "run")[0].run_id for records in (first, second)}
    assert run_ids == {read_state(folder.path, "wandb").run_id}
    run = found(first, "run")[0]
    assert (run.project, run.display_name) == ("openenv-pipe", "smoke/0001")
    assert (run.run_group, [*run.tags]) == ("2026-01-01", ["mine"])
    config = values(run.config.update)
    assert config["trainer"]["group_size"] == folder.written_config.trainer.group_size
    assert config["openenv_pipe"]["folder"] == str(folder.path.resolve())
    columns = ("_step", "grpo/step", "grpo/reward/mean")
    rows = [tuple(row[column] for column in columns) for row in history(first)]
    assert rows == [(0, 1, 0.1), (1, 2, 0.2), (2, 3, 0.3)]
    rows = [tuple(row[column] for column in columns) for row in history(second)]
    assert rows == [(3, 4, 0.4), (4, 5, 0.5)]
    evaluated = ("_step", "eval/step", "eval/during/reward")
    rows = [tuple(row[column] for column in evaluated) for row in history(first)[2:]]
    assert rows == [(2, 2, 0.2)]  # beside the next record, as charts show them
    assert [found(records, "exit")[0].exit_code for records in (first, second)] == [1, 0]
    summary = [values(each.update) for each in found(second, "summary")]
    assert any(each.get("eval/trained/success") == 0.75 for each in summary)
    assert any(each.get("status") == "finished" for each in summary)
    assert any(each.get("eval/during/reward") == 0.5 for each in summary)
    tables = sorted((folder.path / "wandb").glob("offline-run-*/files/media/table/*.json"))
    assert len(tables) == 3
    table = json.loads(tables[0].read_text())
    assert table["columns"] == [*COLUMNS]
    text = table["data"][0][COLUMNS.index("transcript")]
    assert "<script>" in text
    assert "\\u001b[31m" in text
    assert len(text) < 2000
    assert [row[COLUMNS.index("reward")] for row in table["data"]] == [0.0, 1.0, None]


def test_wandb_of_a_fork_names_its_parent(tmp_path):
    pytest.importorskip("wandb")
    parent = tracked(tmp_path, "wandb", "tracker.wandb.mode=offline")
    attempt(parent, [1])
    lineage = parent.lineage("fork", "step_000001")
    child = tracked(tmp_path, "wandb", "tracker.wandb.mode=offline", lineage=lineage)
    attempt(child, [1])
    (records,) = wandb_attempts(child)
    run = found(records, "run")[0]
    assert run.notes.startswith("fork of smoke/0001@step_000001 (run ")
    assert [*run.tags] == ["fork"]
    parent_id = read_state(parent.path, "wandb").run_id
    origin = values(run.config.update)["openenv_pipe"]["parent"]
    assert origin["wandb_id"] == parent_id != run.run_id


# MLflow

mlflow_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)


@mlflow_warnings
def test_mlflow_reads_metrics_parameters_tables_and_the_end(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    folder = tracked(tmp_path, "mlflow", "tracker.mlflow.episodes_every=1", sweep="2026-01-01")
    twice(folder, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("smoke")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == read_state(folder.path, "mlflow").run_id
    assert (run.info.run_name, run.info.status) == ("smoke/0001", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "grpo/reward/mean")
    assert [(each.step, each.value) for each in points] == [
        (step, step / 10) for step in range(1, 6)
    ]
    assert run.data.metrics["eval/trained/success"] == 0.75
    points = client.get_metric_history(run.info.run_id, "eval/during/reward")
    assert [(each.step, each.value) for each in points] == [(2, 0.2), (5, 0.5)]
    group_size = folder.written_config.trainer.group_size
    assert run.data.params["trainer.group_size"] == str(group_size)
    assert run.data.tags["openenv_pipe.sweep"] == "2026-01-01"
    files = [each.path for each in client.list_artifacts(run.info.run_id, "episodes")]
    assert files == [f"episodes/step_{step:06d}.json" for step in (1, 2, 3)]
    local = client.download_artifacts(run.info.run_id, files[0], str(tmp_path))
    import pandas

    table = pandas.read_json(local, orient="split")
    assert [*table.columns] == [*COLUMNS]
    assert "\\u001b[31m" in table["transcript"][0]


@mlflow_warnings
def test_mlflow_nests_a_fork_and_begins_again_without_its_file(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    parent = tracked(tmp_path, "mlflow")
    attempt(parent, [1])
    child = tracked(tmp_path, "mlflow", lineage=parent.lineage("fork", "step_000001"))
    attempt(child, [1])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    tags = client.get_run(read_state(child.path, "mlflow").run_id).data.tags
    assert tags["mlflow.parentRunId"] == read_state(parent.path, "mlflow").run_id
    assert tags["openenv_pipe.fork_of"] == parent.record.id
    client.delete_run(read_state(child.path, "mlflow").run_id)
    attempt(RunFolder.open(child.path), [1, 2])
    state = read_state(child.path, "mlflow")
    assert len(client.get_metric_history(state.run_id, "grpo/reward/mean")) == 2


# Trackio


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Trackio's storage, in a folder of the test's own instead of TRACKIO_DIR."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for module in [each for name, each in sys.modules.items() if name.startswith("trackio")]:
        for name, place in (("TRACKIO_DIR", "trackio"), ("MEDIA_DIR", "trackio/media")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / place)
    return SQLiteStorage


def test_trackio_reads_the_run_and_its_resumption(tmp_path, storage, capsys):
    folder = tracked(tmp_path, "trackio", "tracker.trackio.episodes_every=1", sweep="2026-01-01")
    twice(folder, "trackio")
    run_id = read_state(folder.path, "trackio").run_id
    (run,) = storage.get_run_records("openenv-pipe")
    assert (run["id"], run["name"]) == (run_id, "smoke/0001")
    logs = storage.get_logs("openenv-pipe", "smoke/0001", run_id=run_id)
    rewards = [each["grpo/reward/mean"] for each in logs if "grpo/reward/mean" in each]
    assert rewards == [0.1, 0.2, 0.3, 0.4, 0.5]
    points = [
        (each["step"], each["eval/during/reward"]) for each in logs if "eval/during/reward" in each
    ]
    assert points == [(1, 0.2), (4, 0.5)]
    assert logs[-1]["summary/eval/trained/success"] == 0.75
    assert "status/finished" in logs[-1]
    config = storage.get_run_config("openenv-pipe", "smoke/0001", run_id=run_id)
    assert config["_Group"] == "2026-01-01"
    assert config["trainer"]["group_size"] == folder.written_config.trainer.group_size
    table = next(each["episodes"] for each in logs if "episodes" in each)
    text = table["_value"][0]["transcript"]
    assert text.startswith("```text\n") and "\\u001b[31m" in text
    assert capsys.readouterr().out == ""


# All


def test_a_table_has_the_worst_and_the_best_and_is_due_now_and_then():
    config = compose(["conf=smoke", "tracker=trackio"]).config.tracker["trackio"]
    config = config.model_copy(update={"episodes_every": 10, "episodes_per_table": 3})
    groups = [made_up_group([0.5, 0.1, 0.9]), made_up_group([0.3, 0.7])]

    def rewards(step):
        record = {"step": step, "stage": "grpo"}
        rows = episode_rows(config, TrackedStep(index=0, record=record, groups=groups))
        return [row[COLUMNS.index("reward")] for row in rows]

    assert rewards(10) == rewards(20) == [0.1, 0.3, 0.9]
    assert rewards(11) == []
    for episode in groups[0].episodes:
        episode.unscored = "the judge is silent"
    assert rewards(10) == [0.3, 0.7, None]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("trackio", "trackio"),
    ],
)
def test_a_missing_package_says_what_to_install(monkeypatch, name, module, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    config = compose(["conf=smoke", f"tracker={name}"]).config.tracker[name]
    with pytest.raises(ConfigError, match=rf"pip install .*{name}"):
        check_tracker(name, config)
