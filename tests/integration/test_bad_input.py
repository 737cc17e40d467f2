"""Each wrong input gives one readable paragraph and the right exit code, and leaves nothing
behind."""

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
        (["train", "conf=smoke", "trainer.steps=many"], ["trainer.steps", "many"]),
        (["train", "conf=smoke", "engine=scripted", "engine.policy=a.b:c"], ["scripted"]),
    ],
)
def test_wrong_configuration(tmp_path, arguments, words):
    message = fails(tmp_path, *arguments, code=USER_ERROR)
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_dies_at_start(tmp_path):
    command = "env.command=[python3,-c,'import sys; sys.exit(\"no licence found\")','{port}']"
    message = fails(tmp_path, "train", "conf=smoke", command, *SMALL, code=FAILURE)
    assert "no licence found" in message
    assert "env-0.log" in message
