"""Tags of runs: what is kept, what is rejected, and where they are shown."""

import json

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.cli.main import main
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.tags import FILE, MAX_TAGS, change_tags, read_tags


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path / "runs")


def test_tags_are_added_and_removed(folder):
    assert read_tags(folder.path) == []
    assert change_tags(folder.path, add=["new", "baseline"]) == ["baseline", "new"]
    assert change_tags(folder.path, add=["v1.2"], remove=["new", "unknown"]) == ["baseline", "v1.2"]
    assert read_tags(folder.path) == ["baseline", "v1.2"]


@pytest.mark.parametrize("tag", ["", "two words", "-x", "x" * 41, "a\n", "<b>", "\x1b[31m"])
def test_words_that_are_no_tags(tag, folder):
    with pytest.raises(ConfigError, match="is not a tag"):
        change_tags(folder.path, add=[tag])
    (folder.path / FILE).write_text(json.dumps([tag, "good", 3]))
    assert read_tags(folder.path) == ["good"], "of a folder that somebody else has made"


@pytest.mark.parametrize("content", ["{", "{}", "3", '"text"'])
def test_a_damaged_file_has_no_tags(content, folder):
    (folder.path / FILE).write_text(content)
    assert read_tags(folder.path) == []
    assert change_tags(folder.path, add=["again"]) == ["again"]


def test_their_number_is_bounded(folder):
    with pytest.raises(ConfigError, match=f"at most {MAX_TAGS}"):
        change_tags(folder.path, add=[f"tag{number}" for number in range(MAX_TAGS + 1)])


def test_the_commands_and_the_viewer_show_them(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.path.parents[2])
    run_samples.create(folder.path.parents[1])
    assert run("tag", "smoke/0001", "baseline", "slow") == 0
    assert capsys.readouterr().out == "baseline\nslow\n"
    assert run("tag", "smoke/0001", "--remove", "slow") == 0
    assert run("tag", "smoke/0001") == 0
    assert capsys.readouterr().out == "baseline\n" * 2
    assert run("tag", "smoke/0001", "two words") == ConfigError.exit_code
    assert run("runs") == 0
    assert "smoke/0002" in capsys.readouterr().out
    assert run("runs", "--tag", "baseline") == 0
    shown = capsys.readouterr().out
    assert "smoke/0001" in shown and "baseline" in shown and "smoke/0002" not in shown
    assert [row.tags for row in list_runs([folder.path.parents[1]])] == [("baseline",), ()]
    app = server.build_app(RunStore(folder.path.parents[1]))
    client = TestClient(app, base_url="http://127.0.0.1:8090")
    assert [each["tags"] for each in client.get("/api/runs").json()["runs"]] == [["baseline"], []]


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
