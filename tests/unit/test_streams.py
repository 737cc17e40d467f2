"""Output that cannot be written never ends the work: dead readers, closed streams, encodings."""

import io
import os
import subprocess
import sys

import pytest

from openenv_pipe.cli.streams import is_live

LIMIT_S = 120
WORK = """
import logging, sys, warnings
from openenv_pipe.cli.streams import keep_streams
keep_streams()
for number in range(20):
    print("progress", number, "x" * 4096, file=sys.stderr, flush=True)
    print("result", number, "x" * 4096, flush=True)
    warnings.warn(f"warning {number}")
    logging.getLogger("log").error("line %d", number)
open("done", "w").write("done")
"""


def work(folder, redirection, code=WORK, **variables):
    """Run the work in a shell with a redirection, and return its exit code and its stderr."""
    shell = f'{sys.executable} -c "$CODE" {redirection}'
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"],
        cwd=folder,
        env={**os.environ, "CODE": code, **variables},
        capture_output=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stderr.decode(errors="replace")


@pytest.mark.parametrize(
    "redirection",
    [
        "2>&1 | head -1 >/dev/null",  # a reader of both that goes away
        "2> >(head -1 >/dev/null)",
        "> >(exit 0)",
        ">&-",
        "2>&-",
        ">&- 2>&- <&-",
        "2>/dev/full",
    ],
)
def test_work_goes_on_when_its_output_cannot_be_written(redirection, tmp_path):
    code, _ = work(tmp_path, redirection)
    assert code == 0
    assert (tmp_path / "done").read_text() == "done"


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    code = WORK + "\nassert open('other', 'w').fileno() > 2\n"
    assert work(tmp_path, ">&- 2>&-", code)[0] == 0


def test_a_result_that_a_full_disk_loses_is_an_error(tmp_path):
    code, said = work(tmp_path, ">/dev/full")
    assert code != 0
    assert "No space left on device: 'stdout'" in said


def test_a_command_whose_result_is_lost_says_so(tmp_path):
    code = "from openenv_pipe.cli.main import main; main(['--version'])"
    status, said = work(tmp_path, ">/dev/full", code)
    assert (status, said) == (
        1,
        "error: cannot read or write stdout: No space left on device\n",
    )


def test_a_narrow_encoding_writes_out_what_it_lacks(tmp_path):
    code = "from openenv_pipe.cli.streams import keep_streams; keep_streams(); print('0 – 1 →')"
    assert work(tmp_path, ">&2", code, PYTHONIOENCODING="latin-1") == (0, "0 \\u2013 1 \\u2192\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert is_live(Terminal())
    with monkeypatch.context() as inner:
        inner.setenv("JPY_PARENT_PID", "1")
        assert not is_live(Terminal()), "a command in a notebook's cell"
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Terminal())
    assert not is_live(io.StringIO())
