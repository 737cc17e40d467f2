"""Makes the environment packages importable and Docker usable, gives the tests a state folder of
their own, and turns avoidable skips in CI into failures."""

import gc
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))

# Reasons of skips that CI does not accept: pytest.importorskip's, and those of our own fixtures.
UNWANTED = ("could not import", "not installed:", "broken:")
settings.load_profile("ci")  # everywhere the same examples, without limits that depend on the load
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
COLLECTIONS = gc.get_threshold()
# A Docker daemon and a vLLM server each take so much that there is one of a kind at a time.
SERVERS = ("docker", "vllm")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a script has put aside
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory):
    """Keep the key that run folders are signed by out of the home of who runs the tests, and do
    not narrow tables to their terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(autouse=True)
def _usual_collections():
    """Undo what a test before did that called the command line in this process: it lets Python
    collect rarely."""
    gc.set_threshold(*COLLECTIONS)


@pytest.fixture(scope="session", autouse=True)
def _same_examples():
    """Let Hypothesis take no constants from the project's modules for its examples.

    With them, even derandomized examples depend on which modules other tests have imported.
    """
    from hypothesis.internal.conjecture import providers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "is_local_module_file", lambda path: False)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With pytest-xdist, keep a file on one worker, and all files with `SERVERS` of a kind."""
    from tests.shared_out import FailuresAtOnce, Scheduling

    config.pluginmanager.register(FailuresAtOnce(config))
    return Scheduling(config, log, _server_of)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if config.pluginmanager.has_plugin("dsession"):
        from tests.shared_out import name_interrupted

        name_interrupted(terminalreporter, exitstatus, config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Give each worker (pytest-xdist) cores of its own, but for `SERVERS`, which use the machine's.

    Threads of torch wait for each other, and take several times as long on cores that they share.
    """
    if hasattr(item.config, "workerinput") and CORES:
        given = item.config.workerinput
        # The number of a worker that replaces a dead one is above the count.
        number = int(given["workerid"].removeprefix("gw")) % given["workercount"]
        share = CORES[number :: given["workercount"]]
        os.sched_setaffinity(0, CORES if _server_of(item.path) or not share else share)


def _server_of(path):
    """Return the server that a test file's name speaks of, or None."""
    return next((server for server in SERVERS if server in Path(path).name), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _strict(item, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _strict(collector, (yield))


def _strict(node, report):
    """With OPENENV_PIPE_CI set, turn skips for a missing or broken dependency into failures.

    CI installs these dependencies. A skip because the machine lacks or forbids something stays a
    skip, and pytest prints its reason.
    """
    if os.environ.get("OPENENV_PIPE_CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(UNWANTED):
            report.outcome = "failed"
            report.longrepr = f"{node.nodeid} is skipped in CI: {reason}"
    return report


@pytest.fixture(scope="session")
def docker_client(tmp_path_factory):
    """Return a client of a Docker daemon with `docker_daemon`'s base image, or skip with the
    reason."""
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
    """Return a running vLLM server, or skip with the reason."""
    from tests.vllm_server import installed_vllm, vllm_server

    installed = installed_vllm()
    if isinstance(installed, str):
        pytest.skip(installed)
    with vllm_server(installed, tmp_path_factory.mktemp("vllm")) as served:
        yield served
