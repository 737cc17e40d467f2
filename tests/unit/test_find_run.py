"""Tests that all commands find a run, wherever its configuration has put it."""

import re
import tempfile

import pytest

from openenv_pipe.cli.main import main
from openenv_pipe.commands.evaluate import evaluate
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import PipeError, RunFolderError
from openenv_pipe.extras.judges.check import find_recorded
from openenv_pipe.extras.viewer.compare.load import find_runs
from openenv_pipe.extras.viewer.view import find_target
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.find import find_model, find_run, split_checkpoint
from openenv_pipe.runs.places import runs_folders
from openenv_pipe.runs.run import open_run
from tests.unit import run_samples


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, and a state folder that knows of no other."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("OPENENV_PIPE_RUNS_DIR", raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_runs_are_found_by_id_and_as_the_latest(here):
    first, newer = run_samples.create(here / "runs"), run_samples.create(here / "runs")
    (here / "runs" / "smoke" / "0003").mkdir()
    (here / "runs" / "smoke" / "0003" / "run.json").write_text("{")
    assert find_run("smoke/0001").record.id == first.record.id
    assert find_run("latest").record.id == newer.record.id
    with pytest.raises(RunFolderError, match="no folder smoke/0009, neither here nor in runs"):
        find_run("smoke/0009")


def test_an_evaluation_is_the_latest_run_only_where_nothing_is_trained(here):
    evaluated = run_samples.create(here / "runs", purpose="evaluation")
    evaluated.finish("finished")
    run_samples.create(here / "runs", purpose="evaluation").finish("failed", cause="HostError")
    assert find_run("latest").record.id == find_run("smoke/latest").record.id == evaluated.record.id
    trained = run_samples.create(here / "runs")
    run_samples.create(here / "runs", purpose="evaluation").finish("finished")
    assert find_run("latest").record.id == find_run("smoke/latest").record.id == trained.record.id


def test_a_reproduction_is_the_latest_run_only_where_nothing_is_trained(here):
    """`eval smoke/latest` would judge a few steps as if they were the run."""
    trained = run_samples.create(here / "runs")
    for runs_dir in ("runs", "again"):
        for status in ("finished", "failed"):
            lineage = trained.lineage("reproduction")
            run_samples.create(here / runs_dir, lineage=lineage).finish(status)
        for name in ("latest", "smoke/latest"):
            assert find_run(name, here / runs_dir).path.resolve().name == "0001"


def test_the_newest_run_is_found_in_a_folder_that_its_configuration_names(here):
    run_samples.create(here / "runs")
    elsewhere = run_samples.create(here / "out")
    assert runs_folders() == [here.relative_to(here) / "runs", here.relative_to(here) / "out"]
    assert find_run("latest").path.resolve() == elsewhere.path
    assert open_run("latest").path.resolve() == elsewhere.path
    assert find_target("latest", None)[1] == "#/run/smoke/0001"
    assert [row.id for row in list_runs(runs_folders())] == ["smoke/0001", "out/smoke/0001"]


def test_an_id_of_two_folders_is_ambiguous_for_every_command(here):
    for name in ("runs", "out"):
        run_samples.create(here / name)
    for find in (
        find_run,
        find_model,
        open_run,
        lambda name: find_runs([name]),
        lambda name: find_target(name, None),
        lambda name: find_recorded([name], None, trust=False),
        lambda name: evaluate([name], [], RunControl(), trust=False),
    ):
        with pytest.raises(PipeError, match="ambiguous: runs/smoke/0001 and out/smoke/0001 exist"):
            find("smoke/0001")
    assert find_run("smoke/0001", here / "out").path == here / "out" / "smoke" / "0001"
    assert find_run("out/smoke/0001").path.resolve() == here / "out" / "smoke" / "0001"


@pytest.mark.parametrize("words", [["tag", "latest"], ["episodes", "latest"], ["watch"]])
def test_runs_dir_names_the_only_folder(words, here, capsys):
    run_samples.create(here / "runs")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--runs-dir", "out"])
    assert ended.value.code == RunFolderError.exit_code
    assert re.search("there is no run in out;", capsys.readouterr().err)


@pytest.mark.parametrize("override", ["runs_dir=out", "++runs_dir=out", "+runs_dir=out"])
def test_runs_dir_among_overrides_is_where_eval_looks(override, here):
    run_samples.create(here / "runs")
    with pytest.raises(RunFolderError, match="there is no run in out;"):
        evaluate(["latest", override], [], RunControl(), trust=False)


def test_one_variable_names_the_default_folder_for_new_runs_and_for_all_commands(here, monkeypatch):
    run_samples.create(here / "runs")
    monkeypatch.setenv("OPENENV_PIPE_RUNS_DIR", str(here / "mine"))
    assert compose(["conf=smoke"]).config.runs_dir == str(here / "mine")
    assert runs_folders() == [here / "mine"]
    with pytest.raises(RunFolderError, match="there is no run in"):
        find_run("latest")


def test_folders_are_noted_by_working_directory(here, monkeypatch):
    run_samples.create(here / "out")
    other = here / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert [str(path) for path in runs_folders()] == ["runs"]


def test_a_run_starts_without_a_state_folder(here, monkeypatch):
    (here / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "file"))
    run_samples.create(here / "out")
    assert [str(path) for path in runs_folders()] == ["runs"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("latest", ("latest", "")), ("a@b/0001@best", ("a@b/0001", "best")), ("a@b", ("a", "b"))],
)
def test_a_checkpoint_is_named_after_the_last_at(word, expected):
    assert split_checkpoint(word) == expected


def test_a_folder_with_an_at_in_its_name_is_a_run(tmp_path):
    folder = tmp_path / "runs@home"
    folder.mkdir()
    assert split_checkpoint(str(folder)) == (str(folder), "")


def test_temporary_folders_of_commands_are_not_noted(here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(here / "tmp"))
    run_samples.create(here / "tmp/openenv-pipe-env-1")
    run_samples.create(here / "openenv-pipe-runs")
    assert [path.name for path in runs_folders()] == ["runs", "openenv-pipe-runs"]
