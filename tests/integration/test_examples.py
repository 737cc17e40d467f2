"""The programs and the notebook of examples/ do what they say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status
from tests.commands import Command, run
from tests.ports import lasting_port

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
SMALL = (
    *("trainer.steps=2", "trainer.tasks_per_step=1", "trainer.group_size=2"),
    *("eval.num_tasks=2", "eval.baselines=false"),
)
LISTED = {
    *("train_echo.py", "stop_early.py", "compare_learning_rates.py", "read_episodes.py"),
    *("evaluate_checkpoint.py", "notebook.ipynb"),
    *("agents", "dictionary_client.py", "game2048_client.py", "langgraph_client.py"),
    *("proposer_solver", "vault"),
}
NOTEBOOK = """
import sys
import nbclient
import nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
[parameters] = [cell for cell in notebook.cells if cell.metadata.get("tags") == ["parameters"]]
assert parameters.source.startswith('overrides = ["conf=sums"]')
parameters.source = f"overrides = {['conf=sums', *sys.argv[2:]]}"
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
assert any("image/png" in output.get("data", {}) for output in outputs), outputs
assert not any(output.output_type in ("error", "stream") for output in outputs), outputs
[training] = [cell for cell in notebook.cells if "train(*overrides)" in cell.source]
progress, run = training.outputs  # one output for all lines
lines = progress.data["text/plain"].splitlines()
assert [line for line in lines if line.startswith("grpo 2/2 ")], lines
assert lines[-1].startswith("grpo 2/2 "), lines  # no phase goes on
[comparison] = [cell for cell in notebook.cells if "@start" in cell.source]
assert comparison.outputs[0].data["text/plain"].endswith(": done"), comparison.outputs
"""


def run_python(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_example(folder: Path, name: str, *arguments: str) -> str:
    return run_python(folder, str(ROOT / "examples" / name), *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run of train_echo.py, and what that printed."""
    folder = tmp_path_factory.mktemp("examples")
    return folder, run_example(folder, "train_echo.py", *SMALL)


def test_the_examples_are_listed():
    files = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert files == LISTED
    text = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({name})" in text for name in LISTED)


@pytest.mark.parametrize("path", sorted(AGENTS.glob("conf/agent/*.yaml")), ids=lambda it: it.stem)
def test_agents_of_frameworks_compose(path, monkeypatch):
    """Their frameworks are not installed here; `benchmarks/program_agents.py` trains them."""
    monkeypatch.chdir(AGENTS)
    agent = compose(["conf=coding", f"agent={path.stem}"]).config.agent
    python, script = agent.command
    assert python == "{python}"
    compile((AGENTS / script).read_text(), script, "exec")


def test_train_echo(trained):
    folder, out = trained
    assert "grpo 2/2" in out
    assert (folder / out.splitlines()[-1]).is_file()


def test_game2048_client(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENENV_PIPE_TOKEN", "a-token-of-the-tests")
    port = lasting_port()
    server = Command(tmp_path, "serve", "--train", f"--port={port}", "conf=client", *SMALL)
    try:
        out = run_example(tmp_path, "game2048_client.py", f"http://127.0.0.1:{port}")
        assert (out, server.wait()) == ("played 4 games\n", 0), server.err
    finally:
        server.kill()


def test_dictionary_client(tmp_path, monkeypatch):
    """The warm start on its conversations, too."""
    monkeypatch.setenv("OPENENV_PIPE_TOKEN", "a-token-of-the-tests")
    run_example(tmp_path, "dictionary_client.py", "write", "talks.jsonl")
    source = (
        "trainer/warm_start/source=conversations",
        "trainer.warm_start.source.path=talks.jsonl",
    )
    warm = (*source, "trainer.warm_start.steps=1", "trainer.warm_start.episodes_per_step=2")
    port = lasting_port()
    server = Command(tmp_path, "serve", "--train", f"--port={port}", "conf=client", *warm, *SMALL)
    try:
        out = run_example(tmp_path, "dictionary_client.py", f"http://127.0.0.1:{port}")
        assert (out, server.wait()) == ("played 4 episodes\n", 0), server.err
    finally:
        server.kill()
    metrics = read_metrics(tmp_path / "runs" / "client" / "0001" / "metrics.jsonl")
    assert "reported/lookups" in metrics[-1]


def test_proposer_and_solver(tmp_path):
    """Each is trained on its own reward, and the proposer's follows from the solver's."""
    shutil.copytree(ROOT / "examples" / "proposer_solver", tmp_path, dirs_exist_ok=True)
    warm = ("steps=40", "episodes_per_step=16", "source.num_episodes=64")
    small = ("trainer.steps=1", "trainer.tasks_per_step=2", "eval.num_tasks=2")
    shorter = (f"trainer.warm_start.{each}" for each in warm)
    code, _, err = run(tmp_path, "train", "conf=proposer_solver", "device=cpu", *shorter, *small)
    assert code == 0, err
    folder = tmp_path / "runs" / "proposer_solver" / "0001"
    groups = read_episodes(folder / "episodes/step_000001.jsonl.gz")
    assert [group.task.labels["player"] for group in groups] == ["proposer", "solver"] * 2
    games = [
        pair
        for proposers, solvers in zip(groups[::2], groups[1::2], strict=True)
        for pair in zip(proposers.episodes, solvers.episodes, strict=True)
    ]
    solved = [(proposer, solver) for proposer, solver in games if len(solver.turns) == 4]
    assert solved, "no game had a word"
    for proposer, solver in solved:
        assert proposer.reward == 1 - abs(2 * solver.reward - 1)
    assert all(proposer.reward == 0 for proposer, solver in games if not solver.turns)
    assert 1 <= read_metrics(folder / "metrics.jsonl")[-1]["env/length"] <= 8


def test_vault(tmp_path):
    """The tools answer a player that calls them, and only the right code earns something."""
    shutil.copytree(ROOT / "examples" / "vault", tmp_path, dirs_exist_ok=True)
    scripted = ("engine=scripted", "engine.policy=vault.policies:searching")
    # Every byte is a token for this model.
    longer = ("model=tiny", "model.max_length=768", "env.max_reply_tokens=128")
    small = ("eval.num_tasks=24", "eval.baselines=false")
    code, _, err = run(tmp_path, "eval", "conf=vault", *scripted, *longer, *small)
    assert code == 0, err
    file = tmp_path / "runs" / "vault" / "0001" / "eval" / "scripted.jsonl.gz"
    episodes = [group.episodes[0] for group in read_episodes(file)]
    assert {episode.status for episode in episodes} == {Status.DONE}
    answers = [each.turns[-1].steps[-1].observation["result"]["data"] for each in episodes]
    opened = [answer == "The vault is open." for answer in answers]
    assert [episode.reward for episode in episodes] == [float(each) for each in opened]
    assert 0 < sum(opened) < 24


def test_read_episodes(trained):
    folder, _ = trained
    lines = run_example(folder, "read_episodes.py").splitlines()
    assert lines[0].startswith("echo/0001 step 2: reward")
    assert sum(line.startswith("  reply") for line in lines) == 8  # four turns of two episodes


def test_evaluate_checkpoint(trained):
    folder, _ = trained
    lines = run_example(folder, "evaluate_checkpoint.py", "echo/0001").splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert names == ["runs/echo/0001@start", "echo/0001"]


def test_stop_early_and_go_on(tmp_path):
    target = "-100"  # which a random model reaches as soon as there are three steps
    out = run_example(tmp_path, "stop_early.py", target, *SMALL, "trainer.steps=4")
    first, second = out.splitlines()
    assert first.startswith("echo/0001 finished after 3 steps: stopped by a callback")
    assert second == "echo/0001 finished after 4 steps"


def test_compare_learning_rates(tmp_path):
    lines = run_example(tmp_path, "compare_learning_rates.py", *SMALL).splitlines()
    assert [line.split(":")[0] for line in lines] == ["echo/0001 lr=0.001", "echo/0002 lr=0.004"]


def test_notebook(tmp_path):
    """Its run with random weights: the model of the experiment would take too long."""
    small = ("model=tiny", "device=cpu", "trainer.max_sampling_rounds=1", "eval.during.every=1")
    path = str(ROOT / "examples" / "notebook.ipynb")
    run_python(tmp_path, "-c", NOTEBOOK, path, *small, *SMALL, "host.sessions_per_server=8")
    assert (tmp_path / "runs" / "sums" / "0001" / "report.md").is_file()
