"""Makes the environment packages importable: `wordle`, `echo`. In CI, no skip for a package."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))

# Reasons of skips that an installed package would have prevented: pytest.importorskip's, and ours.
FOR_WANT_OF_A_PACKAGE = ("could not import", "not installed:")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _strict(item, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _strict(collector, (yield))


def _strict(node, report):
    """With OPENENV_PIPE_CI set, what CI installs has to be there: such a skip is a failure."""
    if os.environ.get("OPENENV_PIPE_CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(FOR_WANT_OF_A_PACKAGE):
            report.outcome = "failed"
            report.longrepr = f"{node.nodeid} is skipped in CI: {reason}"
    return report
