"""Files that cannot be written, and folders for sockets."""

import socket
import subprocess
import sys
import tempfile

import pytest

from openenv_pipe.system.files import socket_folder

LIMIT_S = 120
# A limit of the size of files raises as a full disk does: an error without the file's name.
SMALL = """
import resource, signal, sys
from pathlib import Path
from openenv_pipe.learner.checkpoint import _write
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.system.files import write_bytes

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
    ],
)
def test_what_cannot_be_written_is_named(name, work, tmp_path):
    code = SMALL.format(work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, text=True
    )
    assert done.stdout == f"[Errno 27] File too large: '{name}'\n", done.stderr


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
