"""Check how many sessions one server allows, against what the run needs."""

import asyncio
from collections.abc import AsyncIterator

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.errors import ServerFullError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

MAX_SESSIONS = 64


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
