"""The run folder: how it is allocated, what is written, what survives a kill, and secrets."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import run_samples

from openenv_pipe import __version__
from openenv_pipe.config.compose import amend
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import RESUME, StageStep, checkpoint_path, new_checkpoint
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.places import FORMAT
from openenv_pipe.system import files

TEN = StageStep("grpo", 10)


CREATE_THREE = """
import sys
from pathlib import Path

import run_samples

runs_dir = Path(sys.argv[1])
config = run_samples.config(runs_dir)
print("ready", flush=True)
sys.stdin.readline()
print(*(run_samples.create(runs_dir, config).record.id for _ in range(3)))
"""


@pytest.mark.slow
def test_processes_that_start_together_never_share_a_folder(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE_THREE, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(4)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    ids = " ".join(process.communicate(timeout=300)[0] for process in processes).split()
    assert sorted(ids) == [f"smoke/{number:04d}" for number in range(1, 13)]
    for run in ids:
        assert RunFolder.open(tmp_path / run).record.id == run
    assert not list((tmp_path / "smoke").glob(".*"))


def test_numbers_go_on_after_the_highest_and_latest_points_to_the_newest(tmp_path):
    run_samples.create(tmp_path)
    (tmp_path / "smoke" / "0041").mkdir()
    second = run_samples.create(tmp_path)
    assert second.record.id == "smoke/0042"
    assert RunFolder.open(tmp_path / "smoke" / "latest").path == second.path


def test_a_users_own_latest_is_left_alone(tmp_path):
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "latest").write_text("mine")
    run_samples.create(tmp_path)
    assert (tmp_path / "smoke" / "latest").read_text() == "mine"


def test_the_config_comes_back_as_it_was(tmp_path):
    folder = run_samples.create(tmp_path)
    assert RunFolder.open(folder.path).config_to_run() == folder.with_template_time(
        run_samples.config(tmp_path)
    )
    values = json.loads((folder.path / "config.json").read_text())
    assert "num_threads" in values and values["num_threads"] is None
    assert folder.record.config_digest == files.digest_of_file(folder.path / "config.json")
    assert (folder.path / "overrides.txt").read_text() == "conf=smoke\n"


def test_the_record_says_where_the_run_comes_from(tmp_path):
    record = run_samples.create(tmp_path).record
    assert record.versions["python"] == sys.version.split()[0]
    assert "pydantic" in record.versions
    assert record.machine.num_cpus >= 1 and record.machine.memory_mb > 0
    assert record.created.utcoffset().total_seconds() == 0


def test_changes_of_the_checkout_are_kept(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (checkout / "code.py").write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(git + words, check=True)
    # In two parts, because this file may be in a diff too.
    password, token = "hunter" + "2hunter2", "ghs_" + "plain0123456789abcdef"
    index = f"https://ci:{password}@index.corp/simple"
    (checkout / "code.py").write_text(f"a = 2\ntoken = 'b'  # {index} {token} task-{token[4:]}\n")
    for name in ("rewards", "unrelated"):
        (checkout / f"{name}.py").write_text("def usable(episode): return 1.0\n")
    monkeypatch.chdir(checkout)
    used = [
        "+reward.terms.mine={type: python, target: 'rewards:usable', keywords: {}, use: sum, "
        "weight: 1, per_turn: false}"
    ]
    folder = run_samples.create(
        tmp_path / "runs", amend(run_samples.config(tmp_path / "runs"), used)
    )
    seen = next(c for c in folder.record.checkouts if c.folder == str(checkout.resolve()))
    assert len(seen.sha) == 40 and seen.dirty and seen.num_untracked == 1
    diff = (folder.path / "dirty.diff").read_text()
    assert "+a = 2" in diff and "token = 'b'" in diff and f"task-{token[4:]}" in diff
    assert password not in diff and token not in diff and "@index.corp/simple" in diff


@pytest.mark.parametrize("path", ["smoke/0009", "smoke", "."])
def test_opening_what_is_no_run_folder_says_what_to_do(tmp_path, path):
    run_samples.create(tmp_path)
    with pytest.raises(RunFolderError, match=r"latest|openenv-pipe runs|name one"):
        RunFolder.open(tmp_path / path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 1}'])
def test_a_damaged_record_is_a_user_error(tmp_path, content):
    folder = run_samples.create(tmp_path)
    (folder.path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("written", [None, FORMAT - 1, FORMAT + 1])
def test_a_folder_of_another_format_is_rejected_with_both_versions(tmp_path, written):
    path = run_samples.create(tmp_path).path
    record = json.loads((path / "run.json").read_text())
    assert record["format"] == FORMAT
    del record["format"], record["id"]
    record["versions"]["openenv-pipe"] = "0.7.0"
    files.write_json(path / "run.json", record | ({} if written is None else {"format": written}))
    with pytest.raises(RunFolderError, match=rf"format={written}") as caught:
        RunFolder.open(path)
    for each in ("openenv-pipe 0.7.0", f"openenv-pipe {__version__} reads format={FORMAT}"):
        assert each in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trainer": {"spin": 1}}, r"trainer\.spin=1: there is no such key"),
        ({"reward": {"terms": {"a": {"type": "env"}}}}, r"terms\.a\.weight is missing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_a_user_error(tmp_path, change, problem):
    folder = run_samples.create(tmp_path)
    values = json.loads((folder.path / "config.json").read_text())
    for block, keys in change.items():
        values[block] |= keys
    files.write_json(folder.path / "config.json", values)
    with pytest.raises(RunFolderError, match=problem) as caught:
        _ = folder.written_config
    assert f"does not fit openenv-pipe {__version__}" in str(caught.value)


def test_a_runs_dir_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="runs_dir"):
        run_samples.create(tmp_path / "file")


def test_finish_and_update_are_kept(tmp_path):
    folder = run_samples.create(tmp_path)
    folder.update(num_parameters=7)
    folder.update(device="cpu")
    folder.finish("failed", cause="the server died")
    again = RunFolder.open(folder.path)
    assert again.record == folder.record
    assert again.record.facts == {"num_parameters": 7, "device": "cpu"}
    assert (again.status, again.record.cause) == ("failed", "the server died")
    assert 0 <= again.duration_s < 60


RUN_UNTIL_KILLED = """
import sys
sys.path[:0] = sys.argv[1:3]
import run_samples
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
folder = run_samples.create(sys.argv[3])
run_samples.train(folder)
with new_checkpoint(folder.path, StageStep("grpo", 1)) as path:
    (path / "weights").write_text("whole")
with new_checkpoint(folder.path, StageStep("grpo", 2)) as path:
    (path / "weights").write_text("half")
    with folder.metrics_path.open("a") as file:
        file.write('{"step":3,"sta')
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_run_has_died_and_its_half_checkpoint_is_made_anew(tmp_path):
    """It was killed while it wrote metrics and a checkpoint."""
    roots = [str(Path(__file__).parent), str(Path(files.__file__).parents[2])]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_UNTIL_KILLED, *roots, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        alive = RunFolder.open(tmp_path / "smoke" / "latest")
        assert alive.status == "running"
        process.send_signal(signal.SIGKILL)
    killed = RunFolder.open(tmp_path / "smoke" / "latest")
    assert killed.status == "died"
    assert killed.record.status == "running"
    assert [StageStep.of(path).step for path in killed.checkpoints()] == [1]
    assert killed.duration_s < 60
    with new_checkpoint(killed.path, StageStep("grpo", 2)) as path:
        assert not list(path.iterdir())  # nothing is left of the partial checkpoint
        (path / "weights").write_text("whole")
    assert [path.name for path in killed.checkpoints()] == ["step_000001", "step_000002"]


def test_a_checkpoint_that_fails_leaves_nothing(tmp_path):
    folder = run_samples.create(tmp_path)
    with pytest.raises(OSError, match="disk full"), new_checkpoint(folder.path, TEN):
        raise OSError("disk full")
    assert not list((folder.path / "checkpoints").iterdir())


def test_a_checkpoint_that_resumes_is_never_overwritten(tmp_path):
    folder = run_samples.create(tmp_path)
    with new_checkpoint(folder.path, TEN) as path:
        (path / "weights").write_text("first")
        (path / RESUME).mkdir()
    with pytest.raises(RunFolderError, match="not overwritten"), new_checkpoint(folder.path, TEN):
        pytest.fail("the block must not run")
    assert (checkpoint_path(folder.path, TEN) / "weights").read_text() == "first"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    files.write_json(path, {"a": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_no_secret_reaches_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "from-the-environment")
    plain = run_samples.config(tmp_path)
    variables = {"GAME_TOKEN": "only in the config", "HEADER": "Bearer from-the-environment"}
    values = plain.model_dump() | {"env": plain.env.model_dump() | {"variables": variables}}
    config = RunConfig.model_validate(values)
    words = [
        "env.variables.GAME_TOKEN=only in the config",
        "+env.variables={x_password: 'my own', HEADER: from-the-environment}",
    ]
    folder = RunFolder.create(config, overrides=words, command=["openenv-pipe", *words])
    folder.finish("failed", cause="rejected from-the-environment")
    written = "".join(p.read_text() for p in folder.path.rglob("*") if p.is_file())
    for secret in ("from-the-environment", "in the config", "my own"):
        assert secret not in written
    assert folder.written_config.env.variables["HEADER"] == "Bearer <hidden: JUDGE_API_KEY>"
    with pytest.raises(RunFolderError, match="GAME_TOKEN"):
        folder.config_to_run()
    used = folder.config_to_run(secrets_of=["model"])
    assert used.model == folder.with_template_time(plain).model
    again = RunFolder.create(used, overrides=[], command=[])
    assert again.written_config.env == folder.written_config.env
    monkeypatch.setenv("GAME_TOKEN", "only in the config")
    assert folder.config_to_run() == folder.with_template_time(config)


def test_the_command_line_is_quick_without_torch():
    code = (
        "import sys, openenv_pipe.extras.report.run_report, openenv_pipe.reports.runs_table;"
        "import openenv_pipe.trackers;"
        "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
