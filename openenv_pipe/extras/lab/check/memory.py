"""Check whether the server's memory grows with the number of episodes."""

import itertools
from collections.abc import AsyncIterator, Sequence

import numpy
import psutil

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

NUM_SESSIONS = 8
NUM_SAMPLES = 50
NUM_TOLD = 10  # samples between two progress messages
LIMIT_S = 120.0
WARM_UP_SHARE = 0.2  # fraction of first samples to skip, in which caches fill
NUM_ERRORS = 3.0  # standard errors by which a slope must exceed zero
NOISE_BYTES = 2 * 2**20  # growth that allocators alone can cause
LONG_RUN = 100_000  # episodes over which a slope is extrapolated
GIB, MIB = 2**30, 2**20

Sample = tuple[int, int]  # episodes played, bytes of memory


async def probe_memory(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play `subject.num_episodes` episodes, or as many as the time limit allows."""
    if not isinstance(subject.host, ProcessHost):
        yield Line("memory", Result.OK, "not measured: the server is not our child process")
        return
    (pid,) = subject.host.pids
    samples: list[Sample] = []
    done = itertools.count(1)
    every = max(1, subject.num_episodes // NUM_SAMPLES)

    async def do(session: Session, index: int) -> None:
        await subject.play(session, index, subject.choosers["random"])
        number = next(done)
        if number % every == 0:
            samples.append((number, tree_bytes(pid)))
        if number % (NUM_TOLD * every) == 0:
            subject.notify(f"memory: {number} of {subject.num_episodes} episodes")

    await subject.spread(
        range(subject.num_episodes),
        do,
        num_sessions=min(NUM_SESSIONS, subject.num_sessions),
        limit_s=LIMIT_S,
    )
    yield growth_line(samples)


def tree_bytes(pid: int) -> int:
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def growth_line(samples: Sequence[Sample]) -> Line:
    """Fit a straight line to the samples after the warm-up and judge its slope."""
    samples = samples[int(WARM_UP_SHARE * len(samples)) :]
    if len(samples) < 4:
        return Line("memory", Result.OK, "too few episodes to tell; raise --episodes")
    episodes_N, bytes_N = numpy.array(samples, dtype=float).T
    (slope, _), covariance = numpy.polyfit(episodes_N, bytes_N, 1, cov=True)
    error = float(numpy.sqrt(covariance[0, 0]))
    added = slope * (episodes_N[-1] - episodes_N[0])
    text = (
        f"{slope / 1024:.2f} KiB an episode (± {error / 1024:.2f}), "
        f"{bytes_N[-1] / MIB:.0f} MiB after {episodes_N[-1]:.0f} episodes"
    )
    measured = {"bytes_per_episode": float(slope), "bytes": float(bytes_N[-1])}
    if slope < NUM_ERRORS * error or added < NOISE_BYTES:
        return Line("memory", Result.OK, text, measured)
    long_run = slope * LONG_RUN
    result = Result.FAIL if long_run > GIB else Result.WARN
    text += f"; {LONG_RUN:,} episodes would add {long_run / GIB:.1f} GiB: free memory after done"
    return Line("memory", result, text, measured)
