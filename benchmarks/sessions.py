"""Measure a vLLM server on a CPU in a session of its own, and in that of the run, in alternation.

    PYTHONPATH=. python benchmarks/sessions.py [--rounds 3] [--seconds 30]

Linux with `kernel.sched_autogroup_enabled=1` divides the processor between sessions first. In each
round a server is started both ways. Then 32 requests at a time are sent to it, beside a busy
process of our session, which has sleeping threads as runs have. Prints the requests that ended in
a minute, and the processor time of the busy process as a share of one core.
"""

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from openenv_pipe.engines.base import TokenRequest
from openenv_pipe.engines.vllm import launch
from openenv_pipe.system.process import ManagedProcess
from tests.vllm_server import LORA_RANK, installed_vllm, opened, vllm_server

NUM_REQUESTS = 32  # at a time
BUSY = """
import sys, threading, time
end = time.monotonic() + float(sys.argv[1])
def wake():
    while time.monotonic() < end:
        time.sleep(0.005)
for _ in range(36):
    threading.Thread(target=wake, daemon=True).start()
while time.monotonic() < end:
    pass
print(time.process_time() / float(sys.argv[1]))
"""
SIDES = {"a session of its own": True, "the run's session": False}


def measure(folder: Path, seconds: float, *, own_session: bool) -> tuple[float, float]:
    """Return the requests per minute and the busy process's share of one core."""

    def start(*arguments: Any, **options: Any) -> ManagedProcess:
        return ManagedProcess(*arguments, **{**options, "own_session": own_session})

    installed = installed_vllm()
    if isinstance(installed, str):
        sys.exit(installed)
    with patch.object(launch, "ManagedProcess", start), vllm_server(installed, folder) as served:
        return asyncio.run(load(served, folder, seconds))


async def load(served: Any, folder: Path, seconds: float) -> tuple[float, float]:
    async with opened(served, folder, f"model.lora.rank={LORA_RANK}") as (engine, _):
        numbers = itertools.count(engine.begin_rollouts(100_000, NUM_REQUESTS))
        ended = 0

        async def ask(until: float) -> None:
            nonlocal ended
            while time.monotonic() < until:
                number = next(numbers)
                request = TokenRequest(
                    episode=number,
                    turn=0,
                    prompt_ids=[2, 40, 50, 60, 3],
                    max_tokens=8 * (1 + number % 29),
                    temperature=1.0,
                    seed=number,
                )
                await engine.generate(request)
                ended += time.monotonic() < until

        async def ask_all(length: float) -> None:
            until = time.monotonic() + length
            await asyncio.gather(*(ask(until) for _ in range(NUM_REQUESTS)))

        await ask_all(5.0)  # the server compiles
        ended = 0
        command = [sys.executable, "-c", BUSY, str(seconds)]
        busy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        await ask_all(seconds)
        share, _ = await asyncio.to_thread(busy.communicate, timeout=10 * seconds)
        return 60 * ended / seconds, float(share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side, own_session in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                one = measure(Path(folder), given.seconds, own_session=own_session)
            found[side].append(one)
            print(f"{side}: {one[0]:,.0f} requests/min, {one[1]:.2f} of a core", file=sys.stderr)
    print("| the server is in | requests/min | busy process, share of a core |\n|---|---|---|")
    for side, measured in found.items():
        requests, shares = zip(*measured, strict=True)
        print(f"| {side} | {median(requests):,.0f} | {median(shares):.2f} |")


if __name__ == "__main__":
    main()
