"""The sandbox of `coding`: what honest programs may do, and how the system call filter decides."""

import signal
import struct
import sys

import pytest
from coding.sandbox import box, channel
from coding.sandbox.outcome import LIMIT, NOT_LOADED, RAN, VIOLATION, SandboxError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's"),
]
LAYERS = {"resource limits", "no new privileges", "system call filter"}
CALLS = [[[1], [2]], [[3]]]


def values(code: str, calls=CALLS) -> list:
    outcome = box.run(code, "f", calls)
    assert outcome.ending == RAN, outcome
    assert set(outcome.layers) >= LAYERS
    return [result.error or result.value for batch in outcome.results for result in batch]


def test_every_call_of_every_batch_is_answered():
    assert values("def f(x): return x + 1") == [2, 3, 4]


def test_allowed_modules_can_be_used():
    code = """
from __future__ import annotations
import collections, datetime, decimal, functools, heapq, itertools, json, math, random, re
import statistics, string, time
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

class Colour(Enum):
    RED = 1

@dataclass
class Point:
    x: int

class Pair(NamedTuple):
    left: int

Other = collections.namedtuple("Other", "a b")

@functools.lru_cache
def f(x: int) -> list:
    random.shuffle([1, 2])
    day = datetime.datetime.strptime("2024-02-29", "%Y-%m-%d").isoformat()[:10]
    print("seen by nobody", time.time(), datetime.datetime.now())
    words = re.findall(r"[a-z]+", "ab cd")
    return [day, math.gcd(6, 4), words, statistics.mean([1, 3]), Point(x).x, Pair(1).left,
            Other(1, 2).b, Colour.RED.value, str(decimal.Decimal("0.1")), json.loads("[1]")]
"""
    first, *_ = values(code)
    assert first == ["2024-02-29", 2, ["ab", "cd"], 2, 1, 1, 2, 1, "0.1", [1]]


def test_other_modules_do_not_exist():
    outcome = box.run("import numpy", "f", CALLS)
    assert (outcome.ending, outcome.error[0]) == (NOT_LOADED, "ModuleNotFoundError")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(x) return x", "SyntaxError"),
        ("x = '\\ud800'\ndef f(:", "SyntaxError"),
        ("(" * 1000, "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def g(x): return x", "NameError"),
        ("f = 3", "NameError"),
        ("", "NameError"),
    ],
)
def test_code_that_cannot_be_loaded_says_why(code, error):
    outcome = box.run(code, "f", CALLS)
    assert (outcome.ending, outcome.error[0], outcome.results) == (NOT_LOADED, error, [])


def test_results_that_json_would_change_are_errors():
    errors = {
        **dict.fromkeys(["(1, 2)", "{1}", "{1: 2}", "b''", "[f]"], "TypeError"),
        **dict.fromkeys(["float('nan')", "10 ** 5000"], "ValueError"),
        "undefined": "NameError",
    }
    results = ", ".join(f"lambda: {each}" for each in errors)
    calls = [[[number] for number in range(len(errors))]]
    found = values(f"def f(x): return [{results}][x]()", calls)
    assert [each[0] for each in found] == [*errors.values()]


def test_later_calls_do_not_change_earlier_results():
    assert values("seen = []\ndef f(x):\n    seen.append(x)\n    return seen") == [
        [1],
        [1, 2],
        [1, 2, 3],
    ]


def test_files_cannot_even_be_asked_for():
    code = "import os\ndef f(x): return [os.path.exists('/'), os.path.exists('/etc/passwd')]"
    assert values(code) == [[False, False]] * 3


def test_time_memory_and_output_are_bounded():
    for code, limits, detail in (
        ("import os\nos.read(0, 1)", box.Limits(), "waiting instead of computing"),
        ("while True: pass", box.Limits(cpu_s=100, wall_s=2.0), "time"),
        ("x = bytearray(200 * 2**20)", box.Limits(memory_mb=128), "MemoryError"),
        ("print('x' * 10**6)", box.Limits(), "printed text"),
    ):
        outcome = box.run(code, "f", CALLS, limits)
        assert (outcome.ending, outcome.detail) == (LIMIT, detail)


def after(start: str) -> tuple[str, ...]:
    """Return the child's command with other commands of a shell before it."""
    return ("/bin/sh", "-c", f'{start}; exec "$@"', "sh", *box.COMMAND)


def test_a_slow_start_is_not_the_submissions_fault(monkeypatch):
    monkeypatch.setattr(box, "COMMAND", after("sleep 2"))
    limits = box.Limits(wall_s=1.5)
    assert box.run("def f(x): return x", "f", CALLS, limits).ending == RAN
    outcome = box.run("while True: pass", "f", CALLS, box.Limits(cpu_s=100, wall_s=0.5))
    assert (outcome.ending, outcome.detail) == (LIMIT, "time")


def test_nothing_is_left_of_a_child_that_does_not_start(monkeypatch):
    monkeypatch.setattr(box, "COMMAND", after("sleep 60"))
    monkeypatch.setattr(channel, "START_LIMIT_S", 1.0)
    started = []
    start = box._start
    monkeypatch.setattr(box, "_start", lambda: started.append(start()) or started[-1])
    with pytest.raises(SandboxError, match="did not start within 1 seconds"):
        box.run("def f(x): return x", "f", CALLS)
    assert started[0].returncode == -signal.SIGKILL
    assert not [root for folder in box.ROOTS for root in folder.glob(f"coding-{started[0].pid}-*")]


def test_a_root_folder_is_made_where_there_is_room_for_it(monkeypatch, tmp_path):
    for roots, has_root in (([tmp_path / "none", tmp_path], True), ([tmp_path / "none"], False)):
        monkeypatch.setattr(box, "ROOTS", roots)
        outcome = box.run("def f(x): return x", "f", CALLS)
        assert outcome.ending == RAN
        assert has_root or "empty root" not in outcome.layers
        assert not list(tmp_path.iterdir())


def test_an_answer_of_any_size_or_depth_is_survived():
    for text, ending in (
        ("'[' * 10**5", VIOLATION),
        ("'9' * 10**5", VIOLATION),
        ("'x' * 10**7", LIMIT),
        ("'null'", VIOLATION),
    ):
        code = f"import os\ntext = ({text} + '\\n').encode()\n"
        code += "while text: text = text[os.write(1, text):]\ndef f(x): return x"
        assert box.run(code, "f", CALLS).ending == ending


# --- the filter itself, run by a small interpreter of its instructions --------------------------

KILL, ALLOW, REJECT = 0x80000000, 0x7FFF0000, 0x00050001
X86, ARM = (0, 0xC000003E), (1, 0xC00000B7)


def decide(program: bytes, architecture: int, number: int, third_argument: int = 0) -> int:
    """Interpret the filter and return its decision on a system call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, 0, 0, third_argument, 0, 0, 0)
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x15:
            position += if_true if accumulator == value else if_false
        elif code == 0x45:
            position += if_true if accumulator & value else if_false
        else:
            return value


@pytest.fixture
def filter_program(monkeypatch):
    monkeypatch.syspath_prepend(box.COMMAND[-1])
    import system_calls

    return system_calls.program


@pytest.mark.parametrize(
    ("machine", "number", "third_argument", "verdict"),
    [
        (X86, 0, 0, ALLOW),  # read
        (X86, 9, 3, ALLOW),  # mmap for data
        (X86, 9, 7, KILL),  # mmap for code
        (X86, 10, 5, KILL),  # mprotect for code
        (X86, 257, 0, REJECT),  # openat for reading
        (X86, 257, 0o101, KILL),  # openat for writing
        (X86, 2, 0, KILL),  # open
        (X86, 4, 0, REJECT),  # stat
        (X86, 41, 0, KILL),  # socket
        (X86, 57, 0, KILL),  # fork
        (X86, 435, 0, KILL),  # clone3
        (X86, 425, 0, KILL),  # io_uring_setup
        (X86, 0x40000000, 0, KILL),  # read of the x32 calls
        (ARM, 63, 0, ALLOW),  # read
        (ARM, 222, 7, KILL),  # mmap for code
        (ARM, 56, 0o100, KILL),  # openat for writing
        (ARM, 198, 0, KILL),  # socket
        (ARM, 220, 0, KILL),  # clone
        (ARM, 0, 0, KILL),  # io_setup, where x86-64 has read
    ],
)
def test_the_filter_decides(filter_program, machine, number, third_argument, verdict):
    index, architecture = machine
    assert decide(filter_program(index), architecture, number, third_argument) == verdict
    other = X86[1] if machine == ARM else ARM[1]
    assert decide(filter_program(index), other, number, third_argument) == KILL
