"""What signals do: a second Ctrl-C while the event loop is busy, and a terminal that is closed."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

LIMIT_S = 120
BUSY = """
import asyncio
from openenv_pipe.cli.control import SignalStop

async def work():
    print("busy", flush=True)
    while {busy}:
        pass
    await asyncio.sleep(1000)

stop = SignalStop(lambda text: print(text, flush=True))
stop.farewell = "to continue: it"
with stop.exit_code():
    stop.run(work())
"""


HUNG_UP = """
import asyncio, signal, sys
from openenv_pipe.cli.control import SignalStop

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

async def work():
    print("works", flush=True)
    try:
        await asyncio.sleep(1000)
    finally:
        print("saving", flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # until the test goes on
        print("saved", flush=True)

stop = SignalStop(lambda text: None)
with stop.exit_code():
    stop.run(work())
"""


def test_a_hangup_saves_and_others_do_not_count_as_a_second_signal():
    with hanging_up() as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == b"saving\n"
        process.send_signal(signal.SIGHUP)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"saved\n"
        assert process.wait(LIMIT_S) == 128 + signal.SIGHUP


def test_nohup_ignores_hangups():
    with hanging_up("nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"saving\n"
        process.stdin.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM


@contextmanager
def hanging_up(*arguments):
    """Start the work, and wait until it works."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HUNG_UP, *arguments], **pipes) as process:
        try:
            assert process.stdout.readline() == b"works\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_second_signal_ends_the_process_whatever_it_does(number, is_busy):
    code = BUSY.format(busy=is_busy)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.stdout.readline() == b"busy\n"
            latest = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < latest:
                process.send_signal(number)  # Two that come at once may arrive as one.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5 if is_busy else LIMIT_S)
            assert process.returncode == 128 + number
            assert process.stderr.read() == (b"to continue: it\n" if is_busy else b"")
        finally:
            process.kill()
