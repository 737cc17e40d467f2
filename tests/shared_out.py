"""How pytest-xdist shares the tests out to its workers, also when one of them dies, and what it
prints of failures before the end.

xdist's own scheduling runs the test in which a worker has died again, in one worker after another
until it gives up, and leaves a worker idle if it has a single test to run.
"""

from contextlib import suppress

import pytest
from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    """Files go to workers as a whole, all that use a server of a kind to the same one.

    server_of: returns the server that a file uses, or None.
    """

    def __init__(self, config, log, server_of) -> None:
        super().__init__(config, log)
        self._server_of = server_of

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return self._server_of(path) or path

    def remove_node(self, node):
        """Return the test in which a worker has died, and leave those after it to another one."""
        units = self.assigned_work[node]
        unfinished = [name for unit in units.values() for name, done in unit.items() if not done]
        for unit in units.values():
            for name in unfinished[:1]:
                unit.pop(name, None)
        self.assigned_work[node] = {
            scope: unit for scope, unit in units.items() if not all(unit.values())
        }
        super().remove_node(node)
        return unfinished[0] if unfinished else None

    def _reschedule(self, node) -> None:
        """Give a worker that has collected the tests two of them, if there are as many: it does not
        run the first before it has a second, or knows that there is none."""
        if node in self.registered_collections:
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    def _assign_work_unit(self, node) -> None:
        """Send a worker tests. xdist reports one that died meanwhile, and calls `remove_node`."""
        with suppress(OSError):
            super()._assign_work_unit(node)

    def running(self) -> list[str]:
        """Return the test that each worker runs."""
        return [
            next(name for unit in units.values() for name, done in unit.items() if not done)
            for units in self.assigned_work.values()
            if self._pending_of(units)
        ]


def name_interrupted(terminalreporter, exitstatus, config) -> None:
    """Print which test each worker was running, if the tests were interrupted."""
    controller = config.pluginmanager.get_plugin("dsession")
    if exitstatus == pytest.ExitCode.INTERRUPTED and controller is not None:
        for name in controller.sched.running():
            terminalreporter.write_line(f"INTERRUPTED {name}")


class FailuresAtOnce:
    """Prints each failure when it comes, so that a run that is interrupted or killed names it."""

    def __init__(self, config) -> None:
        self._terminal = config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message)
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid} - {reason.strip():.300}")
