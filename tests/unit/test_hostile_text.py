"""An observation that would act where it is shown is text in the terminal, pages and the viewer."""

import re

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.cli import main as cli
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.reports.report import write_report
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.evals import save_evaluation
from openenv_pipe.types import Group, Step
from tests.fakes import made_up_episode, made_up_turn

SIZE = 5_000_000
SIGNS = "<script>alert(1)</script> \x1b[31m\x9b2J [bold red]x[/] ```\n# title \ud800\u202e "
HOSTILE = SIGNS + "x" * SIZE
ACTING = ("\x1b", "\x9b", "\u202e", "\ud800")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A failed run whose observation, reply, error and cause are hostile, with an evaluation."""
    folder = run_samples.create(tmp_path_factory.mktemp("runs"))
    run_samples.train(folder, num_steps=2)
    step = Step(action={"text": HOSTILE}, observation={SIGNS: HOSTILE})
    turn = made_up_turn([1], [2], reply=HOSTILE, steps=[step], unusable=HOSTILE)
    episode = made_up_episode(1.0, turns=[turn])
    episode.first_observation, episode.error = {"prompt": HOSTILE}, HOSTILE
    episode.reward_terms = {SIGNS: 1.0}
    group = Group(id=SIGNS, task=episode.task, episodes=[episode])
    write_episodes(episodes_path(folder.path, 3), [group])
    for label in ("start", "trained"):
        save_evaluation(folder.path, run_samples.evaluation(folder, label, [episode]))
    folder.finish("failed", cause=f"the environment answered {HOSTILE}")
    return folder


def command(capsys, *words):
    """Run a command in this process and return what it prints."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    assert ended.value.code in (0, None), printed.err
    return printed.out + printed.err


def is_text(text):
    """Check that nothing in it acts on a terminal or reorders a line, and that it is short."""
    assert [sign for sign in ACTING if sign in text] == []
    assert len(text) < 200_000
    return "\\u001b[31m" in text and "[bold red]x[/]" in text


def test_in_the_terminal(folder, capsys):
    assert is_text(command(capsys, "episodes", folder.path, "--step", 3))
    assert is_text(command(capsys, "watch", folder.path))
    is_text(command(capsys, "runs", folder.path.parents[1]))


def test_in_the_report(folder):
    text = write_report(folder).read_text()
    assert is_text(text)
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<script>" not in outside
    assert "\n# title" not in outside
    pages = [path.read_text() for path in (folder.path / "eval").glob("*.md")]
    assert len(pages) == 2
    assert all(is_text(page) for page in pages)


def test_in_the_comparison(folder, capsys):
    for form in ("table", "md", "json"):
        assert is_text(command(capsys, "compare", folder.path, "--format", form))


def test_in_the_viewer(folder):
    app = server.build_app(RunStore(folder.path.parents[1]))
    client = TestClient(app, base_url="http://127.0.0.1:8090")
    run, place = "/api/runs/smoke/0001", {"step": 3, "line": 1}
    for address in ("/api/runs", run, f"{run}/episodes", f"{run}/tasks"):
        answer = client.get(address)
        assert answer.text.isascii()
        is_text(answer.text)
    answer = client.get(f"{run}/episode", params=place)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    (turn,) = answer.json()["turns"]
    (seen,) = turn["steps"][0]["observation"].values()
    for text in (turn["reply"], seen, answer.json()["first_observation"]["prompt"]):
        assert is_text(text)
        assert text.startswith("<script>alert(1)</script> \\u001b[31m\\u009b2J")
    whole = client.get(f"{run}/episode", params={**place, "whole": "yes"}).json()
    assert len(whole["turns"][0]["reply"]) > SIZE
