"""What `openenv-pipe` alone, and the end of `demo`, name as the next commands."""

import json
import socket

import pytest

from openenv_pipe.cli import main as cli
from openenv_pipe.cli.next_commands import next_commands
from openenv_pipe.runs.places import FORMAT
from openenv_pipe.system.process_id import ProcessId


def write_run(folder, name, **record):
    path = folder / "runs" / name / "run.json"
    path.parent.mkdir(parents=True)
    known = {"format": FORMAT, "purpose": "training", "lineage": None, "created": f"{name}"}
    path.write_text(json.dumps({**known, **record}))
    return path


@pytest.mark.parametrize(
    ("status", "command"),
    [
        ("running", "openenv-pipe train --resume runs/echo/0002"),  # its process is gone
        ("interrupted", "openenv-pipe train --resume runs/echo/0002"),
        ("failed", "openenv-pipe train --resume runs/echo/0002"),
        ("finished", "openenv-pipe view runs/echo/0002"),
    ],
)
def test_next_is_what_the_newest_training_run_needs(status, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = {"host": socket.gethostname(), "pid": 2**30, "started_s": 0.0}
    write_run(tmp_path, "echo/0001", status="finished")
    run = write_run(tmp_path, "echo/0002", status=status, process=process).parent
    (run / "checkpoints/step_000001").mkdir(parents=True)
    write_run(tmp_path, "echo/0003", status="finished", purpose="evaluation")
    write_run(tmp_path, "echo/0004", status="finished").write_text("no record")
    write_run(tmp_path, "echo/0005", status="finished", format=FORMAT - 1)
    newest, _, first, *_ = next_commands().splitlines()
    assert newest.startswith("newest run: runs/echo/0002, ")
    assert first.split("#")[0].strip() == command


@pytest.mark.parametrize("status", ["failed", "running"])
def test_a_run_without_a_checkpoint_or_one_that_goes_on_is_looked_at(status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = ProcessId.of_this_process().model_dump() if status == "running" else None
    write_run(tmp_path, "echo/0001", status=status, process=process)
    assert "view runs/echo/0001" in next_commands()
    assert "--resume" not in next_commands()


def test_a_folder_of_runs_that_cannot_be_read_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("runs")
    assert "openenv-pipe demo" in next_commands()


def test_demo_trains_sums_and_then_names_the_next_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained = []

    def train(overrides):
        trained.append(overrides)
        write_run(tmp_path, "sums/0001", status="finished")

    monkeypatch.setattr(cli, "train", train)
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["demo", "trainer.steps=2"])
    assert trained == [["conf=sums", "trainer.steps=2"]]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "12 to 25 minutes" in first and "openenv-pipe env new my_env" in last


@pytest.mark.parametrize("override", ["conf=echo", "+conf=echo"])
def test_demo_trains_no_other_experiment(override, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["demo", override])
    assert "openenv-pipe train conf=echo" in capsys.readouterr().err
