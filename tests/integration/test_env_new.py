"""`env new`: what it writes can be played, checked, tested and trained on without changes."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openenv_pipe.commands.findings import Result
from openenv_pipe.extras.lab.check import probe_environment, sessions
from openenv_pipe.extras.lab.scaffold import create_environment
from openenv_pipe.extras.lab.targets import find_target
from tests.commands import SMALL, run

NAME = "odd_letters"
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
CHANGE = re.compile(r"^```diff\n--- (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    code, out, err = run(folder, "env", "new", NAME)
    assert code == 0, err
    assert f"envs/{NAME}/rules.py" in out
    assert f"train conf={NAME}" in out
    return folder


def test_a_second_one_of_the_same_name_is_rejected(folder):
    code, _, err = run(folder, "env", "new", NAME)
    assert code == 2
    assert "error: " in err
    assert "Traceback" not in err


def test_it_passes_its_own_check(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sessions, "SPEED_LIMIT_S", 0.2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lines = probe_environment(
        find_target(NAME, []), policy=None, num_episodes=100, notify=lambda _: None
    )
    assert [line for line in lines if line.result is not Result.OK] == []


def run_tests_of_package(folder, name):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"envs/{name}"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_its_own_tests_pass(folder):
    done = run_tests_of_package(folder, NAME)
    assert done.returncode == 0, done.stdout


def test_the_changes_of_the_tutorial_apply_and_pass_the_tests(tmp_path):
    create_environment("my_env", tmp_path)
    changes = CHANGE.findall(TUTORIAL.read_text())
    assert {path for path, _ in changes} >= {"envs/my_env/rules.py", "conf/env/my_env.yaml"}
    for path, lines in changes:
        old, new = (
            "".join(f"{line[1:]}\n" for line in lines.splitlines() if line.startswith(sign))
            for sign in "-+"
        )
        text = (tmp_path / path).read_text()
        assert text.count(old) == 1, path
        (tmp_path / path).write_text(text.replace(old, new))
    done = run_tests_of_package(tmp_path, "my_env")
    assert done.returncode == 0, done.stdout


def test_it_can_be_trained_on(folder):
    small = ("trainer.steps=2", "trainer.tasks_per_step=2", "trainer.group_size=2", *SMALL)
    code, _, err = run(folder, "train", f"conf={NAME}", "eval.num_tasks=2", *small)
    assert code == 0, err
    assert (folder / f"runs/{NAME}/latest/report.md").is_file()
