"""Check how many sessions one server allows, against what the run needs, and how fast it is."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import numpy

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import ServerFullError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

NUM_SESSIONS = (1, 8, 64)
LIMIT_S = 2.0  # for each, plus the time that running episodes need to end
PERCENTILES = (50, 95, 99)
MAX_SESSIONS = 64


async def probe_speed(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    for num_sessions in NUM_SESSIONS:
        if num_sessions <= subject.num_sessions:
            yield await _measure(subject, num_sessions)


async def _measure(subject: EnvironmentUnderTest, num_sessions: int) -> Line:
    plays: list[PlayedEpisode] = []

    async def do(session: Session, number: int) -> None:
        plays.append(await subject.play(session, number, subject.best))

    duration_s = await subject.spread(
        itertools.count(), do, num_sessions=num_sessions, limit_s=LIMIT_S
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
