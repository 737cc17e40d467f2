"""What a second Ctrl-C does while the event loop is busy and handles no signals."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

LIMIT_S = 120
BUSY = """
import asyncio
from openenv_pipe.cli.signals import SignalStop

async def work():
    print("busy", flush=True)
    while {busy}:
        pass
    await asyncio.sleep(1000)

stop = SignalStop(lambda text: print(text, flush=True))
with stop.exit_code():
    stop.run(work())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_second_signal_ends_the_process_whatever_it_does(number, is_busy):
    code = BUSY.format(busy=is_busy)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"busy\n"
            latest = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < latest:
                process.send_signal(number)  # Two that come at once may arrive as one.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5 if is_busy else LIMIT_S)
            assert process.returncode == 128 + number
        finally:
            process.kill()
