"""Each wrong input gives one readable paragraph and the right exit code, and leaves nothing
behind."""

import socket
from pathlib import Path

import pytest

from tests.commands import SMALL, run

USER_ERROR, FAILURE = 2, 1


def fails(folder: Path, *arguments: str, code: int) -> str:
    """Return the message of a command that must end with exit code `code`."""
    actual, _, err = run(folder, *arguments)
    assert actual == code, err
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    return err[err.index("error: ") :]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], ["conf=", "wordle"]),
        (["train", "conf=wrodle"], ["wrodle", "wordle"]),
        (["train", "conf=smoke", "model=tyni"], ["tyni", "tiny"]),
        (["train", "conf=smoke", "trainer.stepz=3"], ["stepz", "steps"]),
        (["train", "conf=smoke", "trainer.steps=many"], ["trainer.steps", "many"]),
        (["train", "conf=smoke", "trainer.temperature=0"], ["trainer.temperature", "0"]),
        (["train", "conf=smoke", "trainer.group_size=1"], ["trainer.group_size", "2"]),
        (["train", "conf=smoke", "engine=scripted", "engine.policy=a.b:c"], ["scripted"]),
        (["eval", "runs/none/latest"], ["runs/none/latest"]),
        (["show", "conf=smoke", "env.adapter.patern=x"], ["patern", "pattern"]),
    ],
)
def test_wrong_configuration(tmp_path, arguments, words):
    message = fails(tmp_path, *arguments, code=USER_ERROR)
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_there(tmp_path):
    arguments = ("model=hub", "model.path=./nowhere")
    message = fails(tmp_path, "train", "conf=smoke", *arguments, *SMALL, code=USER_ERROR)
    assert "model.path" in message
    assert "./nowhere" in message


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = fails(
            tmp_path, "train", "conf=smoke", f"host.port={port}", *SMALL, code=USER_ERROR
        )
    assert f"host.port={port}: port {port} is used by another program" in message
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_dies_at_start(tmp_path):
    command = "env.command=[python3,-c,'import sys; sys.exit(\"no licence found\")','{port}']"
    message = fails(tmp_path, "train", "conf=smoke", command, *SMALL, code=FAILURE)
    assert "no licence found" in message
    assert "env-0.log" in message


def test_too_few_sessions(tmp_path):
    """An environment that does not read MAX_CONCURRENT_ENVS allows one session."""
    package = tmp_path / "envs" / "lonely"
    (package / "server").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server" / "__init__.py").touch()
    (package / "openenv.yaml").write_text("name: lonely\napp: server.app:app\nport: 8000\n")
    (package / "server" / "app.py").write_text(
        "from openenv.core.env_server.http_server import create_app\n"
        "from wordle.models import WordleAction, WordleObservation\n"
        "from wordle.server.wordle_environment import WordleEnvironment\n"
        "app = create_app(WordleEnvironment, WordleAction, WordleObservation,\n"
        "                 max_concurrent_envs=1)\n"
    )
    envs = Path(__file__).parents[2] / "envs"
    message = fails(
        tmp_path,
        *("train", "conf=smoke", "env.package=lonely"),
        *(f"+env.variables.PYTHONPATH={envs}", *SMALL),
        code=FAILURE,
    )
    assert "host.sessions_per_server=8" in message
    assert "1 session" in message
