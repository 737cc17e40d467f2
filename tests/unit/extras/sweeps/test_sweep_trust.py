"""Sweeps of others, and runs of others in own sweeps, are not resumed without trust."""

import json

import pytest
import run_samples

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.sweeps import command as sweep_command
from openenv_pipe.extras.sweeps.folder import SweepFolder


def test_an_untrusted_sweep_is_not_resumed(tmp_path, monkeypatch, other_user):
    overrides = ["conf=smoke", f"runs_dir={tmp_path}", "seed=0,1"]
    monkeypatch.chdir(tmp_path)
    SweepFolder.create(tmp_path, overrides, []).check_trust()
    sweep = SweepFolder.create(tmp_path, overrides, [])
    (tmp_path / "cloned").mkdir()
    monkeypatch.chdir(tmp_path / "cloned")
    with pytest.raises(RunFolderError, match="is not trusted"):
        sweep.check_trust()
    monkeypatch.chdir(tmp_path)
    other_user()
    with pytest.raises(RunFolderError, match=r"is not trusted[\s\S]*'seed=0,1'"):
        sweep_command.resume(sweep.path, None, None, trust=False)
    assert json.loads((sweep.path / "sweep.json").read_text())["attempt"] == 1


def test_unfinished_runs_of_an_own_sweep_are_checked_too(tmp_path, monkeypatch, other_user):
    monkeypatch.chdir(tmp_path)
    other_user()
    theirs = run_samples.create(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own_state"))
    sweep = SweepFolder.create(tmp_path, ["conf=smoke"], [])
    sweep.add_job(["conf=smoke"])
    sweep.change_job(0, status="interrupted", folder=f"../../{theirs.record.id}")
    with pytest.raises(RunFolderError, match="another user made it"):
        sweep.check_trust()
