"""Check how many sessions one server allows, how fast it is, and whether its memory grows."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import numpy
import psutil

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import ServerFullError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

NUM_SAMPLES = 50
NUM_TOLD = 10  # samples between two progress messages
MEMORY_LIMIT_S = 120.0
WARM_UP_SHARE = 0.2  # fraction of first samples to skip, in which caches fill
NUM_ERRORS = 3.0  # standard errors by which a slope must exceed zero
NOISE_BYTES = 2 * 2**20  # growth that allocators alone can cause
LONG_RUN = 100_000  # episodes over which a slope is extrapolated
GIB, MIB = 2**30, 2**20
Sample = tuple[int, int]  # episodes played, bytes of memory
SPEED_SESSIONS = (1, 8, 64)
SPEED_LIMIT_S = 2.0  # for each, plus the time that running episodes need to end
PERCENTILES = (50, 95, 99)
MAX_SESSIONS = 64


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

    await subject.spread(range(subject.num_episodes), do, limit_s=MEMORY_LIMIT_S)
    yield growth_line(samples)


def tree_bytes(pid: int) -> int:
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
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


async def probe_speed(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    for num_sessions in SPEED_SESSIONS:
        if num_sessions <= subject.num_sessions:
            yield await _measure(subject, num_sessions)


async def _measure(subject: EnvironmentUnderTest, num_sessions: int) -> Line:
    plays: list[PlayedEpisode] = []

    async def do(session: Session, number: int) -> None:
        plays.append(await subject.play(session, number, subject.best))

    duration_s = await subject.spread(
        itertools.count(), do, num_sessions=num_sessions, limit_s=SPEED_LIMIT_S
    )
    steps_s = [duration for play in plays for duration in play.durations_s[1:]]
    resets_s = [play.durations_s[0] for play in plays]
    name = f"speed, {num_sessions} session{'s' * (num_sessions > 1)}"
    measured = _measured(steps_s, resets_s, duration_s)
    if not steps_s:
        return Line(name, Result.WARN, "not measured: no step was answered", measured)
    return Line(name, Result.OK, _text(measured), measured)


def _measured(steps_s: list[float], resets_s: list[float], duration_s: float) -> dict[str, float]:
    measured = {"episodes_per_s": len(resets_s) / duration_s}
    measured["steps_per_s"] = len(steps_s) / duration_s
    for what, values_s in {"step": steps_s, "reset": resets_s}.items():
        for percentile in PERCENTILES if values_s else ():
            value_s = float(numpy.percentile(values_s, percentile))
            measured[f"{what}_p{percentile}_ms"] = 1000 * value_s
    return measured


def _text(measured: dict[str, float]) -> str:
    parts = [f"{measured['steps_per_s']:,.0f} steps/s"]
    for what in ("step", "reset"):
        keys = [f"{what}_p{percentile}_ms" for percentile in PERCENTILES]
        if values := [measured[key] for key in keys if key in measured]:
            shown = " / ".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values)
            parts.append(f"{what} {shown} ms")
    return f"{', '.join(parts)} (p50 / p95 / p99)"


async def probe_sessions(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    wanted = min(subject.num_declared, MAX_SESSIONS)
    async with subject.session():  # The first may have to wait for slots of other probes.
        pass
    opened = await asyncio.gather(*(subject.open() for _ in range(wanted)), return_exceptions=True)
    errors = [each for each in opened if isinstance(each, BaseException)]
    sessions = [each for each in opened if not isinstance(each, BaseException)]
    await asyncio.gather(*(session.close() for session in sessions))
    subject.num_sessions = max(1, wanted - len(errors))
    if other := next((each for each in errors if not isinstance(each, ServerFullError)), None):
        raise other
    yield _line(subject, wanted)


def _line(subject: EnvironmentUnderTest, wanted: int) -> Line:
    measured = {"opened": subject.num_sessions, "wanted": wanted}
    if subject.num_sessions == wanted:
        beyond = f" of {subject.num_declared}" if subject.num_declared > wanted else ""
        return Line("sessions", Result.OK, f"{wanted}{beyond} opened at once", measured)
    return Line(
        "sessions",
        Result.FAIL if subject.is_experiment else Result.WARN,
        f"{subject.num_sessions} opened at once, and "
        f"host.sessions_per_server={subject.num_declared}; raise "
        "max_concurrent_envs=... of create_app in the environment's server/app.py (this program "
        "sets the variable MAX_CONCURRENT_ENVS for it) and set SUPPORTS_CONCURRENT_SESSIONS = True "
        "in its class, "
        f"or set host.sessions_per_server={subject.num_sessions} and a larger host.num_servers",
        measured,
    )
