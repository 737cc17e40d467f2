"""Makes the environment packages importable, and Docker usable. In CI, fewer skips."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))

# Reasons of skips that are none in CI: pytest.importorskip's, and ours.
UNWANTED = ("could not import", "not installed:", "broken:")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _strict(item, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _strict(collector, (yield))


def _strict(node, report):
    """With OPENENV_PIPE_CI set, what CI installs has to be there and to work: a skip for want of
    it is a failure. What the machine lacks or forbids stays a skip, whose reason pytest prints."""
    if os.environ.get("OPENENV_PIPE_CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(UNWANTED):
            report.outcome = "failed"
            report.longrepr = f"{node.nodeid} is skipped in CI: {reason}"
    return report


@pytest.fixture(scope="session")
def docker_client(tmp_path_factory):
    """A client of a daemon with the base image of `docker_daemon`, or a skip with the reason."""
    from tests.docker_daemon import BrokenDaemonError, NoDaemonError, docker_daemon

    with ExitStack() as stack:
        try:
            client = stack.enter_context(docker_daemon(tmp_path_factory.mktemp("docker")))
        except NoDaemonError as error:
            pytest.skip(f"no Docker daemon: {error}")
        except BrokenDaemonError as error:
            pytest.skip(f"broken: {error}")
        yield client


@pytest.fixture(scope="module")  # one server at a time: each takes some gigabytes
def vllm_served(tmp_path_factory):
    """A vLLM server that is up, or a skip with the reason."""
    from tests.vllm_server import installed_vllm, vllm_server

    installed = installed_vllm()
    if isinstance(installed, str):
        pytest.skip(installed)
    with vllm_server(installed, tmp_path_factory.mktemp("vllm")) as served:
        yield served
