"""Run OpenEnv's own validation of a package and of a server, and show what it finds.

OpenEnv runs in a process of its own, because it loads large libraries.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.environments.hosts.package import manifest
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.system.child_environment import child_environment
from openenv_pipe.system.files import read_json
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.resources import find_env

LIMIT_S = 120.0  # of one validation; it takes 6 s of computing time
STATUSES = {"pass": Result.OK, "skip": Result.OK}  # of a check; any other is a warning
LOGIN = "openenv-pipe"  # any name: only the password counts
PIN = "judge pin"  # the name of a line


async def probe_validation(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Yield what OpenEnv says of the package, and of the server if it can be asked.

    A server can be asked if it has a TCP port, and needs no key or one that this program made.
    """
    package = find_env(subject.env.package) if subject.env.package else None
    if package:
        declared = manifest(package).get("validation")
        if (line := judge_pin(declared if isinstance(declared, Mapping) else {})) is not None:
            yield line
    host = subject.host
    key = host.key if isinstance(host, ProcessHost) else None
    has_address = not host.urls[0].startswith("unix:")
    can_ask = has_address and (key is not None or not host.access.headers)
    asked = {}
    if package:
        asked["OpenEnv: package"] = _validate([str(package), "--level", "static"])
    if can_ask:
        asked["OpenEnv: server"] = _validate(["--url", host.urls[0]], key)
    for name, report in zip(asked, await asyncio.gather(*asked.values()), strict=True):
        yield read_report(name, report)


def judge_pin(declared: Mapping[str, Any]) -> Line | None:
    """Check that an environment whose reward a model decides says which model that is.

    Scores of another model are another reward. Returns None if no model decides.

    declared: `validation` in the package's openenv.yaml.
    """
    capabilities, judge = declared.get("capabilities"), declared.get("judge")
    if not isinstance(capabilities, Mapping) or capabilities.get("llm_judged") is not True:
        return None
    pinned = judge if isinstance(judge, Mapping) else {}
    missing = [key for key in ("model", "version") if not pinned.get(key)]
    if missing:
        return Line(
            PIN,
            Result.FAIL,
            "capabilities.llm_judged is true, and validation.judge in openenv.yaml has no "
            f"{' and no '.join(missing)}: another judge is another reward",
        )
    return Line(PIN, Result.OK, f"{pinned['model']}, version {pinned['version']}")


def read_report(name: str, report: Mapping[str, Any] | str) -> Line:
    """Return the line of a report of `openenv validate`, or of why there is none."""
    if isinstance(report, str):
        return Line(name, Result.WARN, report)
    rows = _rows(report)
    problems = [text for result, text in rows if result is not Result.OK]
    measured = {"checks": len(rows), "problems": len(problems)}
    if problems or not rows:
        text = "; ".join(problems) or f"a report without checks: {report!s:.200}"
        return Line(name, Result.WARN, text, measured)
    return Line(name, Result.OK, f"{len(rows)} of its checks passed", measured)


def _rows(report: Mapping[str, Any]) -> list[tuple[Result, str]]:
    """Return the result and the text of each check of a package or of a server."""
    found = []
    for row in report.get("results", ()):
        evidence = ", ".join(map(str, row.get("evidence", ())))
        result = STATUSES.get(row.get("status"), Result.WARN)
        found.append((result, f"{row.get('check_id')}: {evidence}"))
    for row in report.get("criteria", ()):
        result = Result.OK if row.get("passed") is True else Result.WARN
        found.append((result, f"{row.get('description')}: got {row.get('actual')!s:.200}"))
    return found


async def _validate(arguments: Sequence[str], key: str | None = None) -> dict[str, Any] | str:
    """Return the report of `openenv validate` with these arguments, or why there is none.

    key: of the server. OpenEnv has no option for one, but its HTTP library reads NETRC.
    """
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-env-") as folder:
        report, log, netrc = (Path(folder) / each for each in ("report.json", "log", "netrc"))
        netrc.touch(mode=0o600)
        if key is not None:
            netrc.write_text(f"default login {LOGIN} password {key}\n")
        command = [sys.executable, "-m", "openenv.cli", "validate", *arguments]
        process = ManagedProcess(
            [*command, "--output", str(report)],
            log=log,
            environment=child_environment() | {"NETRC": str(netrc)},
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                await process.exited()
        except TimeoutError:
            return f"`openenv validate` did not end within {LIMIT_S:g} s"
        finally:
            await asyncio.shield(process.stopped(1.0))
        try:
            found = read_json(report)
        except RunFolderError:
            return f"`openenv validate` wrote no report: {log.read_text(errors='replace')[-500:]}"
    return found if isinstance(found, dict) else f"a report that is not an object: {found!s:.200}"
