"""How many sessions one server has, against what the run asks of it."""

import asyncio
from collections.abc import AsyncIterator

from openenv_pipe.commands.env.check.bench import Bench
from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.errors import ServerFullError

MOST_SESSIONS = 64


async def probe_sessions(bench: Bench) -> AsyncIterator[Line]:
    """Opens them all at once, and leaves their number in `bench.num_sessions`."""
    wanted = min(bench.num_declared, MOST_SESSIONS)
    async with bench.session():  # the first one may have to wait for those of other probes
        pass
    opened = await asyncio.gather(*(bench.open() for _ in range(wanted)), return_exceptions=True)
    errors = [each for each in opened if isinstance(each, BaseException)]
    await asyncio.gather(*(each.close() for each in opened if each not in errors))
    bench.num_sessions = max(1, wanted - len(errors))
    if other := next((each for each in errors if not isinstance(each, ServerFullError)), None):
        raise other
    yield _line(bench, wanted)


def _line(bench: Bench, wanted: int) -> Line:
    measured = {"opened": bench.num_sessions, "wanted": wanted}
    if bench.num_sessions == wanted:
        beyond = f" of {bench.num_declared}" if bench.num_declared > wanted else ""
        return Line("sessions", Result.OK, f"{wanted}{beyond} opened at once", measured)
    return Line(
        "sessions",
        Result.FAIL if bench.is_experiment else Result.WARN,
        f"{bench.num_sessions} opened at once, and host.sessions_per_server={bench.num_declared}; "
        "let the environment's app read MAX_CONCURRENT_ENVS and set SUPPORTS_CONCURRENT_SESSIONS, "
        f"or set host.sessions_per_server={bench.num_sessions} and a larger host.num_servers",
        measured,
    )
