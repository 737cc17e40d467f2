"""Run folders that are damaged in many ways: each is read, or rejected by a message with a name.

Every case is made by its seed. To repeat one: pytest -k "damaged and 17".
"""

import json
import os
import shutil
import zlib
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path
from random import Random

import pytest
import run_samples
from rich.console import Console

from openenv_pipe.commands.evaluate import _open_logs
from openenv_pipe.errors import RunFolderError, UserError
from openenv_pipe.extras.export.model_card import model_card
from openenv_pipe.extras.report import run_report
from openenv_pipe.extras.report.run_report import write_report
from openenv_pipe.extras.reproduce.comparing import check_readable, first_mismatches
from openenv_pipe.extras.reproduce.recording import record
from openenv_pipe.extras.viewer.compare.grouping import compare_settings
from openenv_pipe.extras.viewer.compare.load import find_runs
from openenv_pipe.extras.viewer.compare.text import as_table, as_text
from openenv_pipe.extras.viewer.episodes.index import index_episodes
from openenv_pipe.extras.viewer.web.answers import as_json
from openenv_pipe.extras.viewer.web.comparisons import show_evaluations
from openenv_pipe.extras.viewer.web.episodes import (
    list_episodes,
    list_tasks,
    show_episode,
    show_group,
    show_tokens,
)
from openenv_pipe.extras.viewer.web.run_page import curves, describe_run
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.summaries import summarise_runs
from openenv_pipe.pipeline import start
from openenv_pipe.pipeline.metrics_log import MetricsLog
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.reports.runs_table import list_runs, runs_table
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint, point_best
from openenv_pipe.runs.episodes import episodes_path
from openenv_pipe.runs.evals import DURING
from openenv_pipe.runs.find import find_model
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.run import Run
from openenv_pipe.system.progress import LineProgress

NUM_CASES = 150
LIMIT_S = 120  # of a case, which takes a fraction of a second

pytestmark = pytest.mark.usefixtures("no_hang")
DEEP = json.loads("[" * 400 + "]" * 400)
ODD_VALUES = (
    *(None, [], {}, "", -1, 0, 1.5, True, 10**18, 10**400, 1e308, -1e308, float("nan"), 1e999),
    *("\x1b[2J\x00\n", "../../../etc/passwd", "x" * 5000, DEEP, [None], {"a": None}, "2026-01-01"),
    *("2026-01-01T00:00:00", "<hidden: NOBODY_HAS_THIS_TOKEN>", "${oc.env:HOME}", "\ud800"),
)
WHOLE = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"17",
    b"\n\n\n",
    b"\xff\xfe\x00garbage",
    b"[" * 10**5,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """The folder of a run that was interrupted after two steps, with all kinds of files."""
    folder = run_samples.create(tmp_path_factory.mktemp("sound"))
    run_samples.train(folder)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, f"{DURING}000001", 0.3, step=1)
    run_samples.evaluate(folder, "trained", 0.6, step=2)
    for step in (1, 2):
        with new_checkpoint(folder.path, StageStep("grpo", step)) as path:
            (path / "model.safetensors").write_bytes(bytes(range(200)))
            (path / "counters.json").write_text('{"steps": 1}')
            (path / "resume").mkdir()
            (path / "resume" / "order.json").write_text("{}")
    point_best(folder.path, folder.checkpoints()[0])
    (folder.path / "logs" / "attempt_1" / "env-0.log").write_text("ready\n")
    folder.finish("interrupted", cause="interrupted")
    write_report(folder)
    index_episodes(folder.path, episodes_path(folder.path, 1))
    return folder.path


@pytest.fixture
def run(sound, tmp_path) -> Path:
    """A copy of the sound run."""
    path = tmp_path / "smoke" / "0001"
    shutil.copytree(sound, path, symlinks=True)
    return path


@pytest.fixture
def _quick(monkeypatch):
    """Check no requirements, start no run, and draw no images, each of which takes long."""
    monkeypatch.setattr(start, "check_requirements", lambda *_, **__: None)
    monkeypatch.setattr(start, "run", lambda attempt, control: None)
    for name in ("draw_learning_curves", "draw_losses"):
        monkeypatch.setattr(run_report, name, lambda *_: False)


def damage(run: Path, random: Random) -> None:
    """Damage one file or folder of a run."""
    paths = sorted(path for path in run.rglob("*") if path.name != ".lock")
    path = random.choice(paths)
    ways = [gone, a_directory, a_loop, a_pipe, whole]
    if path.is_file() and not path.is_symlink():
        ways += [cut_off, garbled, unreadable]
        ways += [odd_value] * 8 * path.name.endswith((".json", ".jsonl", ".jsonl.gz"))
    random.choice(ways)(path, random)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def gone(path: Path, random: Random) -> None:
    remove(path)


def a_directory(path: Path, random: Random) -> None:
    remove(path)
    (path / "inside").mkdir(parents=True)


def a_loop(path: Path, random: Random) -> None:
    remove(path)
    path.symlink_to(path.name)


def a_pipe(path: Path, random: Random) -> None:
    remove(path)
    os.mkfifo(path)


def whole(path: Path, random: Random) -> None:
    remove(path)
    path.write_bytes(random.choice(WHOLE))


def cut_off(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random.randrange(len(content) + 1)])


def garbled(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.randrange(1, 20)):
        content.insert(random.randrange(len(content) + 1), random.randrange(256))
    path.write_bytes(content)


def unreadable(path: Path, random: Random) -> None:
    path.chmod(0)  # Root reads it nevertheless.


def odd_value(path: Path, random: Random) -> None:
    """Put an odd value in the place of one in a JSON file, or in a line of one."""
    content = path.read_bytes()
    is_packed = path.suffix == ".gz"
    try:
        text = (zlib.decompress(content, 31) if is_packed else content).decode()
    except (zlib.error, UnicodeDecodeError):
        return  # It was damaged before.
    lines = [text] if path.suffix == ".json" else text.splitlines() or [""]
    number = random.randrange(len(lines))
    try:
        values = json.loads(lines[number])
    except ValueError:
        return  # It was damaged before.
    lines[number] = json.dumps(with_odd_value(values, random))
    changed = ("\n".join(lines) + "\n").encode(errors="backslashreplace")
    path.write_bytes(zlib.compress(changed, 1, 31) if is_packed else changed)


def with_odd_value(value, random: Random):
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return random.choice(ODD_VALUES)
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = random.choice(list(keys))
    value[key] = with_odd_value(value[key], random)
    return value


def shown(run: Path) -> str:
    """Return what `runs` and `compare` print."""
    console = Console(file=StringIO(), width=200)
    console.print(runs_table(list_runs([run.parents[1]])))
    return console.file.getvalue()


def compared(run: Path) -> None:
    comparison = compare_settings(find_runs([str(run)]))
    as_text(comparison, "json")
    Console(file=StringIO(), width=200).print(as_table(comparison))


def read(run: Path) -> None:
    Run(run).config, Run(run).status, Run(run).evals


def carded(run: Path) -> None:
    subject = find_model(str(run), [], trust=True)
    _open_logs(run)
    model_card(subject.folder, subject.checkpoint_name, Path("it"))


def viewed(run: Path) -> None:
    """What `view` answers about a run; each part on its own, as its pages ask for it."""
    store, key = RunStore(run.parents[1]), f"{run.parent.name}/{run.name}"
    as_json(summarise_runs(store))
    parts = [
        lambda: describe_run(store, key),
        lambda: curves(store, key),
        lambda: show_evaluations(store, {"runs": key}),
        lambda: list_episodes(store, key, {}),
        lambda: list_tasks(store, key, {"source": "eval/trained"}),
        *(
            partial(show, store, key, {"step": step, "line": "1", "group": "1/0"})
            for show in (show_episode, show_group, partial(show_tokens, trust=False))
            for step in ("1", "2")
        ),
    ]
    for part in parts:
        with suppress(UserError, OSError):  # The server answers these as messages.
            as_json(part())


def resumed(run: Path) -> None:
    """What a resume does before it plays, and with what it writes at its end."""
    told: list[str] = []
    control = RunControl(progress=LineProgress(told.append))
    folder = start.resume(str(run), [], [], control, trust=True)
    log = MetricsLog(folder.written_config, folder, control.progress)
    log.close()
    write_report(folder)
    assert all(line.isprintable() or "\n" in line for line in told), told


ACTIONS = {
    "runs": shown,
    "compare": compared,
    "Run": read,
    "metrics": lambda run: Run(run).metrics,
    "episodes": lambda run: [Run(run).episodes(step) for step in (1, 2)],
    "checkpoint": lambda run: Run(run).checkpoint("best"),
    "export": carded,
    "--record": lambda run: record(str(run), run.parent / "made", steps=1, runs_dir=run.parent),
    "reproduce": check_readable,
    "view": viewed,
    "resume": resumed,
}


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_a_damaged_run_is_read_or_rejected_by_name(seed, run, capsys):
    random = Random(seed)
    for _ in range(random.choice((1, 1, 1, 3))):
        damage(run, random)
    for name, act in ACTIONS.items():
        try:
            act(run)
        except UserError as error:
            said = str(error)
            assert str(run) in said or "NOBODY_HAS_THIS_TOKEN" in said, (name, said)
            assert all(char.isprintable() or char == "\n" for char in said), (name, said)
            assert len(said) < 5000, (name, said)
        except OSError as error:  # The command names the file, and has no traceback.
            assert error.filename is not None and str(run) in str(error.filename), name
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said and "\x00" not in said


@pytest.mark.usefixtures("_quick")
def test_a_sound_run_passes_all_of_it(run):
    for act in ACTIONS.values():
        act(run)
    assert first_mismatches(run, run) == []


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("line", ["null", "[]", "{", '{"step": "1", "stage": "grpo"}', '{"a": 1}'])
def test_a_line_of_metrics_that_is_no_record_is_named_and_set_aside(run, line):
    metrics = run / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(f"{first}{line}\n{second}")
    for act in (ACTIONS["metrics"], ACTIONS["--record"], ACTIONS["reproduce"]):
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2"):
            act(run)
    told: list[str] = []
    start.resume(str(run), [], [], RunControl(progress=LineProgress(told.append)), trust=True)
    assert any("metrics.jsonl, line 2" in each and "set aside" in each for each in told)
    assert metrics.read_text() == first + second
    assert (run / "logs/attempt_2/set_aside/metrics.jsonl").read_text() == f"{line}\n"


def test_half_a_last_line_of_metrics_is_left_out_of_a_recording(sound, run, tmp_path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "sta')
    record(str(run), tmp_path / "recording", steps=None, runs_dir=tmp_path)
    assert (tmp_path / "recording/metrics.jsonl").read_bytes() == (
        (sound / "metrics.jsonl").read_bytes()
    )


@pytest.mark.usefixtures("_quick")
def test_a_truncated_evaluation_blocks_nothing_and_is_played_again(run, caplog):
    path = run / "eval" / "trained.json"
    path.write_text(path.read_text()[:100])
    carded(run)
    assert "trained.json" in caplog.text
    told: list[str] = []
    start.resume(str(run), [], [], RunControl(progress=LineProgress(told.append)), trust=True)
    assert any("trained.json" in each and "set aside" in each for each in told)
    assert not path.exists()
    assert (run / "logs/attempt_2/set_aside/eval/trained.json").exists()


@pytest.mark.usefixtures("_quick")
def test_a_run_with_weights_alone_begins_again_and_says_why(run):
    for state in run.glob("checkpoints/step_*/resume"):
        shutil.rmtree(state)
    told: list[str] = []
    start.resume(str(run), [], [], RunControl(progress=LineProgress(told.append)), trust=True)
    begun = told.index("resuming from the beginning")
    assert told[begun + 1].startswith("step_000002 was kept as the best, without the state")


@pytest.mark.usefixtures("_quick")
def test_folders_that_are_gone_are_made_again(run):
    for name in ("logs", "plots"):
        shutil.rmtree(run / name)
    carded(run)
    resumed(run)
    folder = RunFolder.open(run)
    assert (folder.attempts[-1].number, folder.logs.is_dir()) == (2, True)


@pytest.mark.parametrize("seed", range(6))
def test_odd_numbers_are_drawn(seed, run):
    random = Random(seed)
    lines = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in [key for key in record if key not in ("step", "stage")]:
            if random.random() < 0.3:
                record[key] = random.choice((1e308, -1e308, 10**18, -1, 0, None, 1e-300))
        lines.append(json.dumps(record))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    try:
        write_report(RunFolder.open(run))
    except UserError as error:
        assert "metrics.jsonl" in str(error)
