"""Run folders that somebody made to leak files, to fill the memory, or to end a program.

`CASES` has a function for each. `python -m tests.hostile_runs [CASES [COMMANDS]]` tries all of
them, or those whose names the regular expressions find. Every command runs in a process of its own,
forked from one that has imported what it needs; its memory is what it grows by over that one.
"""

import base64
import json
import os
import re
import resource
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from openenv_pipe.system.budgets import MAX_ROWS

SECRET = "the-private-text"
SECRET_NAME = "id_private"
KEY = "smoke/0001"
MAX_MB = 500.0
# Of a command and its children, on a quiet machine: other work of the machine counts little.
MAX_CPU_S = 10.0
MAX_WALL_S = 60.0
LIMIT_CPU_S = 120
Change = Callable[[Path, Path], None]  # of a run folder; the second folder is the private one

FILES = (
    *("run.json", "config.json", "metrics.jsonl", "overrides.txt", "tags.json", "report.md"),
    *("logs/attempt_1/env-0.log", "episodes/step_000001.jsonl.gz", "eval/start.json"),
    *("episodes/tokens_000001.jsonl.gz", "eval/start.jsonl.gz", "episode_index.sqlite"),
    *("checkpoints/step_000001/tokenizer.json", "checkpoints/step_000001/digests.json"),
    *("episode_index.sqlite-wal", "episode_index.sqlite-journal", "episode_index.sqlite-shm"),
)
FOLDERS = ("logs", "logs/attempt_1", "logs/attempt_9", "episodes", "eval", "checkpoints", "plots")
JSON_FILES = ("run.json", "config.json", "tags.json", "eval/start.json", "checkpoints.json")
STRANGE_NAMES = {
    "newline": b"a\nb",
    "escape": b"\x1b[2J\x1b]0;title\x07",
    "bidi": "\u202egpj".encode(),
    "long": b"x" * 240,
    "bytes": b"\xff\xfe",
    "markup": b"<script>alert(1)<",
}
VERY_LONG = "9" * 4000


def put(run: Path, name: str, content: bytes | str) -> None:
    path = run / name
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(name: str, to: str, run: Path, private: Path) -> None:
    targets = {
        "file": private / f"{SECRET_NAME}.json",
        "folder": private,
        "nothing": Path("nothing-is-here"),
        "itself": Path(Path(name).name),
        "zero": Path("/dev/zero"),
    }
    path = run / name
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(targets[to])


def hard_special(name: str, kind: str, run: Path, private: Path) -> None:
    path = run / name
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    else:
        with chdir(path.parent), closing(socket.socket(socket.AF_UNIX)) as opened:
            opened.bind(path.name)


def sparse(name: str, run: Path, private: Path) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(3 * 2**30)


def packed(pieces: Iterator[bytes]) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(piece) for piece in pieces), packer.flush()])


def bomb(name: str, piece: bytes, times: int, run: Path, private: Path) -> None:
    put(run, name, packed(piece for _ in range(times)))


def written(name: str, make: Callable[[], bytes | str], run: Path, private: Path) -> None:
    put(run, name, make())


JSON_BOMBS: dict[str, Callable[[], bytes | str]] = {
    "brackets": lambda: "[" * 10_000_000,
    "zeros": lambda: "[" + "0," * 5_000_000 + "0]",
    "objects": lambda: "[" + "{}," * 3_000_000 + "{}]",
    "keys": lambda: json.dumps({f"k{number}": 0 for number in range(600_000)}),
    "deep": lambda: "[" * 900 + "]" * 900,
    "deep_object": lambda: '{"a":' * 900 + "0" + "}" * 900,
    "digits": lambda: "9" * 5_000_000,
    "wide_text": lambda: json.dumps("x" * 30_000_000 + "\U0001f600", ensure_ascii=False),
    "null_bytes": lambda: b"\0" * 40_000_000,
    "duplicates": lambda: "{" + '"a":[0,0,0],' * 800_000 + '"a":0}',
}


def with_value(name: str, keys: Sequence[str | int], value: Any, run: Path, private: Path) -> None:
    """Set one value of a JSON file."""
    values = json.loads((run / name).read_text())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value() if callable(value) else value
    put(run, name, json.dumps(values))


def with_episode(change: Callable[[dict[str, Any]], None], run: Path, private: Path) -> None:
    """Change the first episode of the first step."""
    path = run / "episodes" / "step_000001.jsonl.gz"
    first, *others = zlib.decompress(path.read_bytes(), 31).splitlines()
    row = json.loads(first)
    change(row)
    text = b"\n".join([json.dumps(row).encode(), *others]) + b"\n"
    path.write_bytes(zlib.compress(text, 1, 31))


def many_rows(count: int, run: Path, private: Path) -> None:
    path = run / "episodes" / "step_000001.jsonl.gz"
    row = zlib.decompress(path.read_bytes(), 31).splitlines()[0] + b"\n"
    path.write_bytes(packed(row for _ in range(count)))


def members(run: Path, private: Path) -> None:
    path = run / "episodes" / "step_000001.jsonl.gz"
    path.write_bytes(path.read_bytes() + packed(b"\0" * 2**20 for _ in range(1000)))


def metrics(lines: Callable[[], Iterator[str]], run: Path, private: Path) -> None:
    put(run, "metrics.jsonl", "\n".join(lines()) + "\n")


def record(step: int, **values: Any) -> str:
    return json.dumps({"stage": "grpo", "step": step, **values})


def names(folder: str, name: bytes, suffix: str, run: Path, private: Path) -> None:
    parent = run / folder
    parent.mkdir(parents=True, exist_ok=True)
    Path(os.fsdecode(os.fsencode(parent) + b"/" + name + suffix.encode())).write_bytes(b"{}")


def tokenizer(change: Callable[[dict[str, Any]], None], run: Path, private: Path) -> None:
    path = run / "checkpoints" / "step_000001" / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values)
    put(run, "checkpoints/step_000001/tokenizer.json", json.dumps(values))


def index(change: Callable[[sqlite3.Connection], None], run: Path, private: Path) -> None:
    """Change the index that the program has made."""
    from openenv_pipe.extras.viewer.episodes.index import EpisodeIndex

    EpisodeIndex.opened(run).close()
    with closing(sqlite3.connect(run / "episode_index.sqlite")) as connection:
        change(connection)
        connection.commit()


def write_ahead(name: str, run: Path, private: Path) -> None:
    """Make SQLite open files beside the index, one of which is a link."""
    index(lambda connection: connection.execute("PRAGMA journal_mode = WAL").close(), run, private)
    link(name, "file", run, private)


def headers(length: int, run: Path, private: Path) -> None:
    put(run, "checkpoints/step_000001/model.safetensors", struct.pack("<Q", length) + b"{}")


def image(run: Path, private: Path) -> None:
    """Let an observation name an image whose file is a link."""
    name = "0" * 32
    reference = {"image": f"images/{name}.png", "width": 10**6, "height": 10**6}
    with_episode(lambda row: row["first_observation"].update(image=reference), run, private)
    link(f"images/{name}.png", "file", run, private)


def _turns(number: int, row: dict[str, Any]) -> None:
    row["turns"] *= number
    row["turn_rewards"] *= number


def _grow(values: dict[str, Any]) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    values["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 9}


def _huge_cell(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE episodes SET preview = ?, terms = ?", ["x" * 10**8, "{" * 10**7])


def _cases() -> Iterator[tuple[str, Change]]:
    for name in (*FILES, *FOLDERS):
        for to in ("file", "folder", "itself"):
            yield f"link {name} {to}", partial(link, name, to)
    for name in FILES[:11]:
        yield f"link {name} zero", partial(link, name, "zero")
        yield f"special {name} pipe", partial(hard_special, name, "pipe")
    for name in ("run.json", "config.json", "eval", "episodes", "logs", "episode_index.sqlite"):
        for kind in ("folder", "socket", "unreadable"):
            yield f"special {name} {kind}", partial(hard_special, name, kind)
    for name in FILES:
        yield f"sparse {name}", partial(sparse, name)
    for name in ("episodes/step_000001", "episodes/tokens_000001", "eval/start"):
        file = f"{name}.jsonl.gz"
        yield f"gzip zeros {name}", partial(bomb, file, b"\0" * 2**20, 1500)
        yield f"gzip lines {name}", partial(bomb, file, b"\n" * 2**20, 1500)
        yield f"gzip values {name}", partial(bomb, file, b"[" + b"0," * 2**19, 400)
        yield f"gzip rows {name}", partial(bomb, file, b'{"a":1}\n' * 2**17, 100)
    for name in JSON_FILES:
        for kind, make in JSON_BOMBS.items():
            yield f"json {kind} {name}", partial(written, name, make)
    for count in (20_000, MAX_ROWS, 2 * MAX_ROWS):
        yield f"rows valid {count}", partial(many_rows, count)
    yield "gzip members", members
    yield "image link", image
    for folder, suffix in (("logs/attempt_1", ".log"), ("eval", ".json"), ("episodes", ".gz")):
        for kind, strange in STRANGE_NAMES.items():
            yield f"name {kind} {folder}", partial(names, folder, strange, suffix)
    yield from _values()
    yield from _rows()
    yield from _tokenizers()


def _values() -> Iterator[tuple[str, Change]]:
    for keys, value in (
        (["tasks"], lambda: [0] * 400_000),
        (["tasks"], lambda: [{}] * 200_000),
        (["tasks", 0, "seeds"], lambda: ["x"] * 400_000),
        (["tasks", 0, "task"], lambda: "\x1b[2J\u202e" * 10**6),
        (["statuses"], lambda: {f"k{number}": "x" for number in range(9000)}),
    ):
        yield (
            f"report {keys} {value.__code__.co_firstlineno}",
            partial(with_value, "eval/start.json", keys, value),
        )
    for keys, value in (
        (["attempts"], lambda: [{}] * 200_000),
        (["command"], lambda: [0] * 400_000),
        (["facts"], lambda: {"a": [0] * 400_000}),
        (["cause"], lambda: "\x1b[31m" * 10**6),
        (["id"], lambda: "../../../etc/passwd"),
        (["attempts", 0, "number"], lambda: 10**18),
    ):
        yield f"record {keys}", partial(with_value, "run.json", keys, value)
    for keys, value in (
        (["env", "command"], lambda: [0] * 90_000),
        (["reward", "terms"], lambda: {f"k{number}": {} for number in range(9000)}),
        (["model", "chat_template"], lambda: "{% for i in range(99999) %}" * 2),
        (["trainer", "steps"], lambda: 10**400),
    ):
        yield f"config {keys}", partial(with_value, "config.json", keys, value)


def _rows() -> Iterator[tuple[str, Change]]:
    for what, change in (
        ("turns", partial(_turns, 20_000)),
        ("ids", lambda row: row["turns"][0].update(prompt_ids=[10**100] * 10)),
        ("texts", lambda row: row["turns"][0].update(reply="\u202e\x1b[2J" * 10**6)),
        ("terms", lambda row: row.update(reward_terms={f"k{n}": 0.0 for n in range(200_000)})),
        ("nan", lambda row: row.update(reward=float("nan"))),
        ("huge", lambda row: row.update(reward=10**400)),
        ("logprobs", lambda row: row["turns"][0].update(logprobs="f4:" + "A" * 10**7)),
        ("tokens", lambda row: row["turns"][0].update(prompt_ids=[1] * 1_500_000)),
        ("parents", lambda row: row["turns"][0].update(parent=0)),
    ):
        yield f"episode {what}", partial(with_episode, change)
    for what, lines in (
        ("wide", lambda: (record(1, **{f"m{n}": 1.5 for n in range(9000)}) for _ in range(1))),
        (
            "names",
            lambda: (record(n, **{f"{n}-{i}": 1.5 for i in range(100)}) for n in range(5000)),
        ),
        ("200000", lambda: (record(n, a=1e9) for n in range(200_000))),
        ("1000000", lambda: (record(n, a=1e9) for n in range(1_000_000))),
        (
            "full",
            lambda: (record(n, **{f"m{i}": n + 0.5 for i in range(99)}) for n in range(45_000)),
        ),
        ("long", lambda: iter([record(1, a="x" * 3_000_000)])),
        ("nan", lambda: iter(['{"stage":"grpo","step":1,"loss/policy":NaN}'])),
        ("step", lambda: iter([record(10**9, a=1)])),
        ("stage", lambda: (record(n, stage="\x1b[2J") for n in range(3))),
    ):
        yield f"metrics {what}", partial(metrics, lines)
    for place in (
        f"checkpoints/step_{VERY_LONG[:200]}/a",
        f"episodes/step_{VERY_LONG[:200]}.jsonl.gz",
    ):
        yield f"number {place[:20]}", partial(written, place, lambda: b"{}")
    for name in ("episode_index.sqlite-shm", "episode_index.sqlite-wal"):
        yield f"index link {name}", partial(write_ahead, name)
    yield "index cell", partial(index, _huge_cell)
    for length in (2**62, 2**63, 2**33, 0):
        yield f"header {length}", partial(headers, length)


def _tokenizers() -> Iterator[tuple[str, Change]]:
    strip = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    for what, change in (
        ("strip", lambda values: values.update(decoder=strip)),
        ("grow", _grow),
        (
            "regex",
            lambda values: values.update(
                normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"}
            ),
        ),
        (
            "expand",
            lambda values: values.update(
                decoder={"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10**7}
            ),
        ),
        ("empty", lambda values: values.clear()),
        ("ids", lambda values: values["model"]["vocab"].update(a=2**40)),
    ):
        yield f"tokenizer {what}", partial(tokenizer, change)


CASES: dict[str, Change] = dict(_cases())


def make_sound(runs_dir: Path) -> Path:
    """Make the run folder that the cases change."""
    from openenv_pipe.models.tiny import build_tokenizer
    from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
    from openenv_pipe.runs.trained_tokens import tokens_path
    from tests.unit import run_samples

    folder = run_samples.create(runs_dir)
    run_samples.train(folder)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, "trained", 0.6, step=2)
    with new_checkpoint(folder.path, StageStep("grpo", 1)) as path:
        build_tokenizer().save_pretrained(path)
        (path / "model.safetensors").write_bytes(bytes(range(200)))
    row = {"group": "1/0", "member": 1, "turns": [0], "mismatch": "", "entropy": ""}
    row["entropy"] = base64.b64encode(bytes(12)).decode()
    packed_row = zlib.compress(json.dumps(row).encode(), 1, 31)
    tokens_path(folder.path / "episodes" / "step_000001.jsonl.gz").write_bytes(packed_row)
    (folder.logs / "env-0.log").write_text("ready\n")
    folder.finish("interrupted", cause="interrupted")
    return folder.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one command has done with one folder."""

    exit_code: int
    output: str  # with what it has written into files
    growth_mb: float
    cpu_s: float  # of the command and its children
    wall_s: float


def pages(run: Path, scratch: Path) -> None:
    """Ask the viewer for all that its pages ask for."""
    from starlette.testclient import TestClient

    from openenv_pipe.extras.viewer.web.run_store import RunStore
    from openenv_pipe.extras.viewer.web.server import build_app

    client = TestClient(build_app(RunStore(run.parents[1])), base_url="http://127.0.0.1")
    of_run = f"/api/runs/{KEY}"
    episode = "source=train&step=1&line=1&group=1/0"
    for address in (
        "/api/runs",
        "/api/sweeps",
        f"/api/compare?runs={KEY}",
        f"/api/evaluations?runs={KEY}",
        *(of_run, f"{of_run}/progress", f"{of_run}/curves", f"{of_run}/episodes"),
        *(f"{of_run}/log?name=attempt_{number}/{SECRET_NAME}.log" for number in (1, 9)),
        *(f"{of_run}/log?name=attempt_1/env-0.log", f"{of_run}/tasks"),
        *(f"{of_run}/{what}?{episode}" for what in ("episode", "group", "tokens")),
        f"{of_run}/image?name={'0' * 32}.png",
    ):
        print(client.get(address).text[: 10**7])


def report(run: Path, scratch: Path) -> None:
    from openenv_pipe.extras.report.run_report import write_report
    from openenv_pipe.runs.folder import RunFolder

    folder = RunFolder.open(run)
    folder.config_to_run(trust=True)
    print(write_report(folder).read_text())


def command(*words: str) -> Callable[[Path, Path], None]:
    """Return the command line that has the run in place of RUN, and a new path in place of NEW."""

    def act(run: Path, scratch: Path) -> None:
        from openenv_pipe.cli.main import main

        known = {"RUN": str(run), "NEW": str(scratch / "new"), "RUNS": str(run.parents[1])}
        main([known.get(word, word) for word in words])

    return act


ACTIONS: dict[str, Callable[[Path, Path], None]] = {
    "pages": pages,
    "bundle": command("view", "RUN", "--bundle", "NEW"),
    "runs": command("runs", "--runs-dir", "RUNS"),
    "compare": command("compare", "RUN"),
    "episodes": command("episodes", "RUN", "--text", "crane"),
    "episodes export": command("episodes", "export", "RUN", "--format", "jsonl", "--output", "NEW"),
    "watch": command("watch", "RUN"),
    "eval": command("eval", "RUN"),
    "export": command("export", "RUN", "--output", "NEW"),
    "reproduce": command("reproduce", "RUN"),
    "record": command("reproduce", "RUN", "--record", "NEW"),
    "resume": command("train", "--resume", "RUN"),
    "tag": command("tag", "RUN", "good"),
    "report": report,
}


def attempt(act: Callable[[Path, Path], None], run: Path, scratch: Path) -> Outcome:
    """Run a command in a process that is forked from this one, and must have no threads."""
    scratch.mkdir()
    start_s = time.monotonic()
    with (scratch / "output").open("w+b") as output, (scratch / "grown").open("w+b") as grown:
        child = os.fork()
        if child == 0:
            _act(act, run, scratch, output.fileno(), grown.fileno())
        _, status, used = os.wait4(child, 0)
        wall_s = time.monotonic() - start_s
        grown.seek(0)
        growth_mb = float(grown.read() or "inf")
    texts = [each.read_bytes() for each in scratch.rglob("*") if each.is_file()]
    return Outcome(
        exit_code=os.waitstatus_to_exitcode(status),
        output=b"\n".join(texts).decode(errors="replace"),
        growth_mb=growth_mb,
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=wall_s,
    )


def _act(
    act: Callable[[Path, Path], None], run: Path, scratch: Path, output: int, grown: int
) -> None:
    """Act in the forked process, and end it."""
    code = 99
    before = _peak_mb()
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["XDG_STATE_HOME"] = str(scratch / "state")  # of another user
        with (
            chdir(scratch),
            open(1, "w", closefd=False) as stdout,
            open(2, "w", closefd=False) as stderr,
            redirect_stdout(stdout),
            redirect_stderr(stderr),
        ):
            try:
                act(run, scratch)
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException as error:
                from openenv_pipe.errors import UserError

                code = 2 if isinstance(error, UserError) else 98
                traceback.print_exc() if code == 98 else print(error)
    finally:
        os.write(grown, str(_peak_mb() - before).encode())
        os._exit(code)


def _peak_mb() -> float:
    """Return the most memory that this process has had since it was forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size_kb,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(size_kb) / 1024


def preload() -> None:
    """Import what the commands import, so that it counts as nobody's memory."""
    import importlib

    for name in (
        *("cli.main", "cli.results", "commands.evaluate", "models.load"),
        *("extras.export.command", "extras.reproduce.command", "pipeline.start"),
        *("extras.report.run_report", "reports.runs_table"),
        *("extras.viewer.view", "extras.viewer.web.server", "extras.viewer.web.tokens"),
        *("extras.viewer.episodes.listing", "extras.viewer.episodes.export"),
        *("extras.viewer.compare", "extras.viewer.run_state"),
    ):
        importlib.import_module(f"openenv_pipe.{name}")
    importlib.import_module("starlette.testclient")


def outcomes(
    case: str, sound: Path, folder: Path, wanted: str = "", max_cpu_s: float = MAX_CPU_S
) -> Iterator[tuple[str, str, Outcome]]:
    """Yield the commands on a case's folder with what is wrong; empty if nothing is.

    wanted: a regular expression of the names of commands.
    """
    private = folder / "private"
    private.mkdir(parents=True)
    for name in (f"{SECRET_NAME}.json", f"{SECRET_NAME}.log", "step_000001.jsonl.gz", "start.json"):
        (private / name).write_text(SECRET)
    acts = {what: act for what, act in ACTIONS.items() if re.search(wanted, what)}
    hostile = folder / "hostile"
    shutil.copytree(sound, hostile, symlinks=True)
    CASES[case](hostile, private)
    for number, (what, act) in enumerate(acts.items()):
        run = folder / str(number) / "runs" / KEY
        run.parent.mkdir(parents=True)
        # Unlike shutil, cp copies pipes, sockets and the holes of sparse files.
        subprocess.run(["cp", "-a", hostile, run], check=True)
        scratch = folder / str(number) / "scratch"
        outcome = attempt(act, run, scratch)
        yield what, _problem(outcome, private, max_cpu_s), outcome
        shutil.rmtree(folder / str(number))


def _problem(outcome: Outcome, private: Path, max_cpu_s: float) -> str:
    if outcome.exit_code not in (0, 2):
        return f"exit code {outcome.exit_code}: {outcome.output[-3000:]}"
    if "Traceback" in outcome.output:
        return outcome.output[outcome.output.index("Traceback") :][:3000]
    if SECRET in outcome.output or SECRET_NAME in outcome.output.replace(str(private), "").replace(
        f"{SECRET_NAME}.log", ""
    ):
        return "it shows what is outside of the folder"
    if "\x1b[2J" in outcome.output or "\u202e" in outcome.output:
        return "it writes control characters"
    if outcome.growth_mb > MAX_MB:
        return f"it takes {outcome.growth_mb:.0f} MB"
    if outcome.cpu_s > max_cpu_s or outcome.wall_s > MAX_WALL_S:
        return f"it takes {outcome.cpu_s:.1f} s of CPU, {outcome.wall_s:.1f} s in all"
    if any(path.read_bytes() != SECRET.encode() for path in private.iterdir()):
        return "it has written outside of the folder"
    return ""


def main(cases: str = "", commands: str = "", max_cpu_s: str = str(MAX_CPU_S)) -> int:
    preload()
    num_bad = num_tried = num_cases = 0
    worst_mb = worst_s = ("", 0.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        sound = make_sound(Path(name) / "sound")
        for number, case in enumerate(case for case in CASES if re.search(cases, case)):
            num_cases += 1
            folder = Path(name) / str(number)
            found = outcomes(case, sound, folder, commands, float(max_cpu_s))
            for what, problem, outcome in found:
                num_tried += 1
                worst_mb = max(worst_mb, (f"{case}: {what}", outcome.growth_mb), key=lambda x: x[1])
                worst_s = max(worst_s, (f"{case}: {what}", outcome.cpu_s), key=lambda x: x[1])
                if problem:
                    num_bad += 1
                    took = f"{outcome.growth_mb:.0f} MB, {outcome.cpu_s:.1f} s of CPU"
                    print(f"{case}: {what}: {took}: {problem}", flush=True)
            shutil.rmtree(folder)
    print(f"{num_cases} folders, {num_tried} commands, {num_bad} bad; most: {worst_mb}, {worst_s}")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
