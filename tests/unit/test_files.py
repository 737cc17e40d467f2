"""Files that cannot be written, or have more than is read, and folders for sockets."""

import json
import os
import socket
import subprocess
import sys
import tempfile

import pytest
from fakes import run_config

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.budgets import Account, JsonBudget
from openenv_pipe.system.files import (
    new_folder,
    read_bytes,
    read_json,
    socket_folder,
    write_bytes,
)

LIMIT_S = 120
# A limit of the size of files raises as a full disk does: an error without the file's name.
SMALL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from openenv_pipe.learner.checkpoint import _write
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.system.files import naming, write_bytes

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    {work}
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("a.json", "write_bytes(Path('a.json'), bytes(2000))"),
        (
            "metrics.jsonl",
            "MetricsFile(Path('metrics.jsonl')).append({'stage': 'x' * 2000})",
        ),
        ("counters.json", "_write(Path('counters.json'), {'x' * 2000: 1})"),
        (
            "a.safetensors",
            "with naming(Path('a.safetensors')): save_file({'x': np.zeros(2000)}, 'a.safetensors')",
        ),
    ],
)
def test_what_cannot_be_written_is_named(name, work, tmp_path):
    code = SMALL.format(work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, text=True
    )
    assert done.stdout == f"[Errno 27] File too large: '{name}'\n", done.stderr


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_the_umask_decides_who_may_read_what_is_written(umask, tmp_path):
    config = run_config().model_copy(update={"runs_dir": str(tmp_path / "runs")})
    before = os.umask(umask)
    try:
        run = RunFolder.create(config, overrides=[], command=[])
        write_bytes(tmp_path / "file", b"x")
        with new_folder(tmp_path / "export", "--output") as aside:
            write_bytes(aside / "inner", b"x")
    finally:
        os.umask(before)
    for path in (run.path, tmp_path / "export"):
        assert path.stat().st_mode & 0o777 == 0o777 & ~umask
    for path in (run.path / "run.json", tmp_path / "file", tmp_path / "export" / "inner"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert not [each.name for each in tmp_path.rglob(".*")]


def test_sockets_fit_whatever_the_length_of_tmpdir(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = socket_folder("openenv-pipe-ranks-")
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "gateway.sock"))
        (folder / "gateway.sock").unlink()
    finally:
        folder.rmdir()


def test_a_file_beyond_its_budget_is_named_and_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(RunFolderError, match=r"config\.json is larger than 16 MB") as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    with pytest.raises(RunFolderError, match="is larger than 64 MB"):
        read_bytes(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + b"0," * 500_000 + b"0]", "has more than 500,000 values"),
        (b"[" + b"{}," * 250_000 + b"{}]", "has more than 500,000 values"),
        (b"[" * 81 + b"]" * 81, "nests more than 80 levels deep"),
        (b'{"a":' * 81 + b"0" + b"}" * 81, "nests more than 80 levels deep"),
        (b"[" * 400_000, "cannot read"),
        (json.dumps(dict.fromkeys(map(str, range(10_001)))).encode(), "more than 10,000 keys"),
    ],
)
def test_json_beyond_its_budget_is_named(content, message, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_json_within_its_budget_is_read(tmp_path):
    path = tmp_path / "run.json"
    values = {"deep": json.loads("[" * 79 + "]" * 79), "many": [0] * 400_000, "text": "," * 99_000}
    path.write_text(json.dumps(values))
    assert read_json(path) == values


def test_documents_that_are_kept_together_share_a_budget(tmp_path):
    account = Account(JsonBudget(max_mb=1, max_values=10))
    account.spend(tmp_path / "a", b"[1,2,3,4,5]")
    with pytest.raises(RunFolderError, match="b, with what was read before it, has more than 10"):
        account.spend(tmp_path / "b", b"[1,2,3,4,5,6]")
