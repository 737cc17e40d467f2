"""Measure how fast the server answers one session and many, asked by one process."""

import itertools
from collections.abc import AsyncIterator

import numpy

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

NUM_SESSIONS = (1, 8, 64)
LIMIT_S = 2.0  # for each, plus the time that running episodes need to end
PERCENTILES = (50, 95, 99)


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
