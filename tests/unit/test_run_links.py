"""Links in a run folder that somebody else made lead no reader out of it."""

import os
import shutil
from contextlib import suppress

import pytest
import run_samples

from openenv_pipe.cli import main as cli
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.web import run_page
from openenv_pipe.extras.viewer.web.bundle import write_bundle
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import names_in, open_file, read_bytes

pytestmark = pytest.mark.slow

SECRET = "the-private-text"
PRIVATE = "id_private.json"
# Every place of a run folder from which something is read.
PLACES = (
    *("run.json", "config.json", "metrics.jsonl", "overrides.txt", "tags.json", "dirty.diff"),
    *("logs", "logs/attempt_1", "logs/attempt_9", "logs/attempt_1/env-0.log"),
    *("episodes", "episodes/step_000001.jsonl.gz", "episodes/tokens_000001.jsonl.gz"),
    *("eval", "eval/start.json", "eval/start.jsonl.gz", "images", "checkpoints"),
    *("checkpoints/step_000001", "report.md", "episode_index.sqlite"),
)


@pytest.fixture
def private(tmp_path):
    """A folder outside of all runs, whose names and contents are private."""
    folder = tmp_path / "private"
    folder.mkdir()
    for name in (PRIVATE, "id_private.log", "id_private.jsonl.gz", "step_000001.jsonl.gz"):
        (folder / name).write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder of runs with one that has a step and an evaluation."""
    runs_dir = tmp_path_factory.mktemp("evaluated")
    folder = run_samples.create(runs_dir)
    run_samples.train(folder, num_steps=1)
    run_samples.evaluate(folder, "start", 0.5)
    return runs_dir


@pytest.mark.parametrize("to_folder", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_no_output_has_anything_behind_a_link(
    place, to_folder, evaluated, private, tmp_path, capsys
):
    runs_dir = shutil.copytree(evaluated, tmp_path / "runs", symlinks=True)
    path = runs_dir / "smoke/0001" / place
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(private if to_folder else private / PRIVATE)
    with suppress(RunFolderError):
        write_bundle(
            RunStore(runs_dir), tmp_path / "b", keys=["smoke/0001"], stamps=[], trust=False
        )
    for words in (
        ["runs"],
        ["episodes", "smoke/0001"],
        ["compare", "smoke/0001"],
        ["tag", "latest"],
    ):
        with pytest.raises(SystemExit):
            cli.main([*words, "--runs-dir", str(runs_dir)])
    printed = capsys.readouterr()
    written = [each for each in (tmp_path / "b").rglob("*") if each.is_file()]
    for text in (printed.out, printed.err, *(each.read_text(errors="replace") for each in written)):
        assert SECRET not in text
        assert "id_private" not in text.replace(str(private), "")
    assert all(each.read_text() == SECRET for each in private.iterdir())


def test_a_link_to_the_run_itself_is_followed(tmp_path):
    folder = run_samples.create(tmp_path / "elsewhere")
    run_samples.train(folder, num_steps=2)
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    latest = RunFolder.open(tmp_path / "runs" / "smoke" / "latest")
    assert len(read_metrics(latest.metrics_path)) == 2
    assert read_reports(latest.path) == {}
    assert [row.status for row in list_runs([tmp_path / "runs"])] == ["running"]


def test_a_log_behind_a_link_is_neither_listed_nor_shown(private, tmp_path):
    folder = run_samples.create(tmp_path)
    (folder.path / "logs" / "attempt_9").symlink_to(private)
    assert "attempt_9/id_private.log" not in run_page.logs_of(folder.path)
    with pytest.raises(RunFolderError, match="is a link"):
        run_page.tail(folder.path, "attempt_9/id_private.log")


def test_folders_and_pipes_are_no_files(tmp_path):
    folder = run_samples.create(tmp_path)
    os.mkfifo(folder.path / "pipe")
    for name in ("pipe", "logs"):
        with pytest.raises(RunFolderError, match="it is not a file"):
            read_bytes(folder.path / name)
    with pytest.raises(RunFolderError, match="cannot read"):
        open_file(folder.path / "missing")
    assert names_in(folder.path / "missing") == names_in(folder.path / "run.json") == []
