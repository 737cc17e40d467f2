"""Errors of several concurrent tasks: one is raised, and it lists all others."""

import asyncio
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from openenv_pipe.errors import ConfigError, HostError, SessionError, raise_first


async def fail(error: Exception, cause: Exception | None) -> None:
    raise error from cause


def raised(*errors: Exception, cause: Exception | None = None) -> BaseException:
    """Return the error that is raised when all tasks fail in one turn of the event loop."""

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for error in errors:
                    tasks.create_task(fail(error, cause))
        except BaseExceptionGroup as group:
            raise_first(group)

    with pytest.raises(Exception) as caught:
        asyncio.run(run())
    return caught.value


def test_the_first_error_is_raised_and_the_others_are_noted():
    first = HostError("server 0 died")
    error = raised(first, SessionError("closed"), SessionError("closed"), ConfigError("no key"))
    assert error is first
    shown = "".join(traceback.format_exception(error))
    assert shown.count("at the same time: SessionError: closed") == 1
    assert "at the same time: ConfigError: no key" in shown
    assert "ExceptionGroup" not in shown


def test_an_exception_that_ended_a_program_comes_first(tmp_path):
    log = tmp_path / "server.log"
    frames = ['  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import'] * 20
    own = '  File "app.py", line 3, in <module>'
    log.write_text("\n".join([own, *frames, "requests.MyError: no SCORE"]))
    message = str(HostError("it died", log))
    assert message == f"it died: requests.MyError: no SCORE (log: {log})\n  | {own}\n" + (
        "  | requests.MyError: no SCORE"
    )
    log.write_text("ValueError: earlier\nKilled")
    assert str(HostError("it died", log)).startswith(f"it died (log: {log})")


def test_the_error_keeps_its_own_cause():
    cause = OSError("connection reset")
    error = raised(HostError("server 0 died"), cause=cause)
    assert error.__cause__ is cause
    assert "connection reset" in "".join(traceback.format_exception(error))


def test_the_error_keeps_its_own_context():
    async def fail_while_handling() -> None:
        try:
            raise OSError("connection reset")
        except OSError:
            raise HostError("server 0 died")  # noqa: B904

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail_while_handling())
        except BaseExceptionGroup as group:
            raise_first(group)

    with pytest.raises(HostError) as caught:
        asyncio.run(run())
    assert isinstance(caught.value.__context__, OSError)


def test_errors_of_groups_within_groups_are_found():
    inner = ExceptionGroup("inner", [HostError("a"), SessionError("b")])
    with pytest.raises(HostError) as caught:
        raise_first(ExceptionGroup("outer", [inner, ConfigError("c")]))
    assert caught.value.__notes__ == [
        "at the same time: SessionError: b",
        "at the same time: ConfigError: c",
    ]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("compose('conf=echo', 'trainer.stpes=7')", True),
        ("open_run('nothing/0001')", True),
        ("open_run()", False),
    ],
)
def test_a_notebook_shows_the_message_of_a_users_error_alone(call, shown, tmp_path):
    pytest.importorskip("IPython")
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c"]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    code = f"from openenv_pipe import compose, open_run; {call}"
    done = subprocess.run([*command, code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert ("Traceback" not in done.stdout + done.stderr) is shown, done
    if shown:
        assert "Error: " in done.stdout.splitlines()[0]
