"""`ProcessHost` with real OpenEnv servers, and with stubs that start fast and can misbehave."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.early import early_host
from openenv_pipe.environments.hosts.process import ProcessHost, find_program
from openenv_pipe.errors import (
    ConfigError,
    HostError,
    ServerFullError,
    SessionClosedError,
    SessionTimeoutError,
    StepRejectedError,
)
from openenv_pipe.system.process import free_port
from tests.ports import lasting_port
from tests.stub_server import started, stub_command

LIMIT_S = 120.0  # waits for what takes a moment on an idle machine

# A package in the layout of `openenv init`, reduced to one file. The action's message selects what
# the environment does.
OPENENV_APP = """
import os, time
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Parrot(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.turns = 0
        return Heard(text=f"seed {seed} {os.environ.get('MOOD')} {os.getpid()}")

    def step(self, action, timeout_s=None, **_):
        if action.message == "fail":
            raise RuntimeError("no such word")
        if action.message == "sleep":
            time.sleep(1.0)
        self.turns += 1
        return Heard(text=action.message, reward=0.5, done=self.turns == 2)

    @property
    def state(self):
        return State(step_count=self.turns)

limit = int(os.environ["MAX_CONCURRENT_ENVS"]) if os.environ.get("MOOD") != "deaf" else 1
app = create_app(Parrot, Say, Heard, env_name="parrot", max_concurrent_envs=limit)
"""

STUB = """
async def answer(data, number, seed):
    if data.get("message") == "die":
        os._exit(9)
    if data.get("message") == "sleep":
        await asyncio.sleep(0.5)
    return {"observation": {"pid": os.getpid()}}

if sys.argv[3] == "dies":
    sys.exit("cannot find the dictionary")
if sys.argv[3] == "mute":
    import time
    time.sleep(60)
"""


def settings(**values):
    """Return the env and host configurations."""
    env = {
        "name": "parrot",
        "package": None,
        "python": None,
        "command": None,
        "variables": {},
        "reset_timeout_s": LIMIT_S,
        "step_timeout_s": LIMIT_S,
        "max_message_mb": 1,
    }
    host = {
        "type": "process",
        "num_servers": 1,
        "sessions_per_server": 2,
        "port": None,
        "start_timeout_s": LIMIT_S,
        "stop_timeout_s": 2.0,
        "max_restarts": 0,
    }
    env |= {key: values.pop(key) for key in list(values) if key in env}
    return SimpleNamespace(**env), SimpleNamespace(**(host | values))


def stub(mood="fine", **values):
    """Return settings for a stub server."""
    return settings(command=stub_command(STUB, mood), **values)


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "parrot")


def write_package(folder):
    """Write a real OpenEnv package and return its folder, for `env.package`."""
    (folder / "server").mkdir(parents=True)
    for path in (folder / "__init__.py", folder / "server" / "__init__.py"):
        path.touch()
    (folder / "openenv.yaml").write_text("spec_version: 1\nname: parrot\napp: server.app:app\n")
    (folder / "server" / "app.py").write_text(OPENENV_APP)
    return str(folder)


def running(parts, log_dir):
    return started(ProcessHost(*parts, log_dir))


async def within(condition):
    """Poll until a condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- real servers ------------------------------------------------------------------------------


async def test_real_servers_play_episodes_side_by_side(package, tmp_path, monkeypatch):
    monkeypatch.setenv("MOOD", "overridden")
    parts = settings(
        package=package, variables={"MOOD": "merry"}, num_servers=2, sessions_per_server=3
    )
    async with running(parts, tmp_path / "logs") as host:
        assert host.capacity == 6
        assert len(host.urls) == 2

        async def episode(seed):
            async with host.session() as session:
                first = await session.reset({"seed": seed}, LIMIT_S)
                assert first.observation["text"].startswith(f"seed {seed} merry ")
                with pytest.raises(StepRejectedError, match="no such word"):
                    await session.step({"message": "fail"}, LIMIT_S)
                with pytest.raises(StepRejectedError, match="message: Field required"):
                    await session.step({}, LIMIT_S)
                await session.step({"message": "a"}, LIMIT_S)
                last = await session.step({"message": "b"}, LIMIT_S)
                assert (last.observation["text"], last.reward, last.done) == ("b", 0.5, True)
                return int(first.observation["text"].split()[-1])

        pids = await asyncio.gather(*(episode(seed) for seed in range(20)))
        assert len(set(pids)) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"env-0.log", "env-1.log"}


@pytest.mark.parametrize(("enabled", "status"), [("false", 404), ("true", 200)])
async def test_the_web_page_is_served_where_it_is_asked_for(package, tmp_path, enabled, status):
    parts = settings(package=package, variables={"ENABLE_WEB_INTERFACE": enabled})
    async with (
        running(parts, tmp_path) as host,
        httpx.AsyncClient(base_url=host.urls[0], timeout=LIMIT_S) as client,
    ):
        assert (await client.get("/web/")).status_code == 401
        assert (await client.get("/web/", params={"key": host.key})).status_code == 303
        assert (await client.get("/web/")).status_code == status  # by the cookie


# What a server imports: OpenEnv, then its web page, as an environment may do that has its own.
IMPORTS = """
import sys
from openenv_pipe.environments.hosts.serve_package import LateWebPage
sys.meta_path.insert(0, LateWebPage())
from openenv.core.env_server import WebInterfaceManager, create_app
assert "gradio" not in sys.modules
from openenv.core.env_server.web_interface import WebInterfaceManager as Real, get_origin
assert "gradio" in sys.modules
assert type(Real) is type
Real.__init__ = lambda self, text: None
assert type(WebInterfaceManager("a")) is Real
"""


def test_the_web_page_is_imported_when_it_is_used():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=LIMIT_S)


async def test_a_real_server_with_one_session_is_rejected_with_the_numbers(package, tmp_path):
    parts = settings(package=package, variables={"MOOD": "deaf"}, sessions_per_server=8)
    with pytest.raises(HostError) as caught:
        async with running(parts, tmp_path):
            pass
    message = str(caught.value)
    assert "accepted 1 session " in message
    assert "host.sessions_per_server=8" in message


async def test_a_slot_that_a_given_up_step_still_holds_is_waited_for(package, tmp_path):
    async with running(settings(package=package, sessions_per_server=1), tmp_path) as host:
        with pytest.raises(SessionTimeoutError):
            async with host.session() as session:
                await session.reset({}, LIMIT_S)
                await session.step({"message": "sleep"}, 0.1)
        async with host.session() as session:
            await session.reset({}, LIMIT_S)


# --- starting ----------------------------------------------------------------------------------


async def test_a_server_that_dies_at_start_is_noticed_at_once_and_quoted(tmp_path):
    parts = stub("dies", start_timeout_s=100 * LIMIT_S)
    with pytest.raises(HostError, match="exit code 1") as caught:
        async with asyncio.timeout(LIMIT_S), running(parts, tmp_path):
            pass
    assert "cannot find the dictionary" in str(caught.value)
    assert caught.value.log == tmp_path / "env-0.log"


async def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path):
    parts = stub("mute", start_timeout_s=1.0)
    host = ProcessHost(*parts, tmp_path)
    with pytest.raises(HostError, match="within 1 s"):
        await host.start()
    with pytest.raises(HostError, match="closed"):
        async with host.session():
            pass


async def test_one_bad_server_of_several_ends_the_others(tmp_path):
    env, config = stub(num_servers=3, port=None)
    env.command = stub_command(STUB, "fine")
    host = ProcessHost(env, config, tmp_path)
    host._servers[1]._command = stub_command(STUB, "dies")
    with pytest.raises(HostError, match="exit code 1"):
        await host.start()
    assert not any(server._process.alive for server in host._servers if server._process)


async def test_a_fixed_port_in_use_names_the_key(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} is used .*host.port, or null"):
            async with running(stub(port=port), tmp_path):
                pass


async def test_fixed_ports_follow_each_other(tmp_path):
    port = lasting_port(2)
    async with running(stub(port=port, num_servers=2), tmp_path) as host:
        assert host.urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]


async def test_a_picked_port_that_was_taken_meanwhile_is_replaced(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = itertools.chain([other.getsockname()[1]], iter(free_port, None))
        monkeypatch.setattr(
            "openenv_pipe.environments.hosts.process.free_port", lambda _: next(ports)
        )
        async with running(stub(), tmp_path) as host, host.session() as session:
            await session.reset({}, LIMIT_S)


def test_an_environment_without_package_and_command_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"env\.package"):
        ProcessHost(*settings(), tmp_path)


async def test_a_command_with_a_slash_starts_beside_the_package(package, tmp_path):
    script = tmp_path / "serve.sh"
    (tmp_path / "stub.py").write_text(stub_command(STUB)[2])
    stub_line = f"{sys.executable} $(dirname $0)/stub.py 127.0.0.1 $1 fine"
    script.write_text(f"#!/bin/sh\nexec {stub_line}\n")
    script.chmod(0o755)
    parts = settings(package=package, command=["./serve.sh", "{port}"])
    assert find_program(parts[0]) == "./serve.sh"
    async with running(parts, tmp_path / "logs") as host:
        assert len(host.urls) == 1


async def test_a_server_writes_into_a_folder_of_its_own(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "open('words.txt', 'w').write(os.environ['DATA'] + ' ' + sys.argv[4])"
    source = stub_command(f"{script}\n{STUB}")[2]
    (tmp_path / "stub.py").write_text(source)
    command = [sys.executable, "stub.py", "127.0.0.1", "{port}", "fine", "{package}"]
    parts = settings(package=package, command=command, variables={"DATA": "{package}/words"})
    async with running(parts, tmp_path / "logs"):
        pass
    written = tmp_path / "logs" / "env-0.files" / "words.txt"
    assert written.read_text() == f"{package}/words {package}"
    assert not (tmp_path / "words.txt").exists()


def test_a_package_that_is_filled_in_has_to_be_there():
    env, config = stub()
    env.command = ["serve", "{package}"]
    with pytest.raises(ConfigError, match=r"env\.command contains \{package\}"):
        ProcessHost(env, config, Path("logs"))


# --- lending sessions ----------------------------------------------------------------------------


async def test_lenders_wait_for_a_slot_and_are_spread_over_servers(tmp_path):
    async with running(stub(num_servers=2, sessions_per_server=2), tmp_path) as host:
        most = lent = 0
        all_lent = asyncio.Barrier(4)

        async def episode():
            nonlocal most, lent
            async with host.session() as session:
                lent += 1
                most = max(most, lent)
                first = await session.reset({}, LIMIT_S)
                async with asyncio.timeout(LIMIT_S):
                    await all_lent.wait()
                lent -= 1
                return first.observation["pid"]

        pids = await asyncio.gather(*(episode() for _ in range(40)))
        assert most == 4
        assert sorted(pids.count(pid) for pid in set(pids)) == [20, 20]


async def test_a_session_is_reused_unless_its_lender_left_a_message_unanswered(tmp_path):
    async with running(stub(sessions_per_server=1), tmp_path) as host:
        async with host.session() as first:
            await first.reset({}, LIMIT_S)
        async with host.session() as second:
            assert second is first

        async def play():
            async with host.session() as session:
                await session.step({"message": "sleep"}, LIMIT_S)

        task = asyncio.create_task(play())
        await within(lambda: not first.usable)  # the request has been sent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with host.session() as third:
            assert third is not first
            await third.reset({}, LIMIT_S)


async def test_cancelled_waiters_lose_no_slot(tmp_path):
    async with running(stub(sessions_per_server=1), tmp_path) as host:

        async def play():
            async with host.session() as session:
                await session.reset({}, LIMIT_S)

        async with host.session():
            waiters = [asyncio.create_task(play()) for _ in range(20)]
            await asyncio.sleep(0)
        for waiter in waiters[:15]:  # the first of them has just got the slot
            waiter.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*waiters, return_exceptions=True)
            async with host.session() as session:
                await session.reset({}, LIMIT_S)


async def test_idle_sessions_are_used_in_turn(tmp_path):
    async with running(stub(sessions_per_server=2), tmp_path) as host:
        async with host.session() as first:
            pass
        async with host.session() as second:
            assert second is not first
        async with host.session() as third:
            assert third is first


async def test_an_error_of_the_lender_is_its_own(tmp_path):
    async with running(stub(sessions_per_server=1), tmp_path) as host:
        with pytest.raises(KeyError):
            async with host.session():
                raise KeyError("ours")
        async with host.session() as session:
            await session.reset({}, LIMIT_S)


async def test_a_server_that_others_have_filled_ends_the_episode_not_the_run(tmp_path, monkeypatch):
    async with running(stub(sessions_per_server=1), tmp_path) as host:
        async with host.session() as session:
            await session.close()
        intruder = await Session.connect(host.urls[0], timeout_s=LIMIT_S, max_message_mb=1)
        await intruder.reset({}, LIMIT_S)
        with monkeypatch.context() as impatient, pytest.raises(ServerFullError):
            impatient.setattr(host._env, "reset_timeout_s", 1.0)
            async with host.session():
                pass
        await intruder.close()
        async with host.session() as session:
            await session.reset({}, LIMIT_S)


# --- servers that die ----------------------------------------------------------------------------


async def die(host):
    """End the server from within an episode; raises the error that the episode gets."""
    async with host.session() as session:
        await session.step({"message": "die"}, LIMIT_S)


async def test_a_dead_server_is_replaced_and_only_its_episodes_end(tmp_path):
    async with running(stub(num_servers=2, max_restarts=1), tmp_path) as host:
        before = set(host.urls)
        async with host.session() as one, host.session() as two:
            with pytest.raises(SessionClosedError):
                await one.step({"message": "die"}, LIMIT_S)
            await two.step({"message": "go on"}, LIMIT_S)
            with pytest.raises(SessionClosedError):
                await one.reset({}, LIMIT_S)
        await within(lambda: len(before & set(host.urls)) == 1 and len(host.urls) == 2)

        async def play():
            async with host.session() as session:
                return (await session.reset({}, LIMIT_S)).observation["pid"]

        assert len(set(await asyncio.gather(*(play() for _ in range(4))))) == 2


async def test_a_server_killed_from_outside_is_replaced_too(tmp_path):
    async with running(stub(max_restarts=1), tmp_path) as host:
        async with host.session() as session:
            pid = (await session.reset({}, LIMIT_S)).observation["pid"]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(SessionClosedError):
                await session.step({}, LIMIT_S)
        async with asyncio.timeout(LIMIT_S), host.session() as session:
            assert (await session.reset({}, LIMIT_S)).observation["pid"] != pid


async def test_the_host_fails_with_the_cause_when_restarts_are_used_up(tmp_path):
    async with running(stub(num_servers=2, sessions_per_server=1), tmp_path) as host:
        with pytest.raises(SessionClosedError):
            await die(host)
        waiting = [asyncio.create_task(die(host)) for _ in range(3)]
        async with asyncio.timeout(LIMIT_S):
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, HostError | SessionClosedError)
        for _ in range(2):
            with pytest.raises(HostError, match=r"host.max_restarts=0 .*exit code 9"):
                async with host.session():
                    pass


# --- closing -----------------------------------------------------------------------------------


async def test_close_may_be_called_again_and_ends_lent_sessions(tmp_path):
    async with running(stub(), tmp_path) as host:
        async with host.session() as session:
            pid = (await session.reset({}, LIMIT_S)).observation["pid"]
            await host.close()
            with pytest.raises(SessionClosedError):
                await session.step({}, LIMIT_S)
        await host.close()
        assert not is_alive(pid)
        with pytest.raises(HostError, match="closed"):
            async with host.session():
                pass


async def test_a_cancelled_close_still_ends_the_servers(tmp_path):
    async with running(stub(), tmp_path) as host:
        async with host.session() as session:
            pid = (await session.reset({}, LIMIT_S)).observation["pid"]
        closing = asyncio.create_task(host.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await within(lambda: not is_alive(pid))


async def test_a_cancelled_start_leaves_nothing_running(tmp_path):
    host = ProcessHost(*stub("mute", num_servers=2), tmp_path)
    starting = asyncio.create_task(host.start())
    await within(lambda: all(server._process for server in host._servers))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(server._process.alive for server in host._servers)


async def test_servers_that_were_launched_early_are_taken_over(tmp_path):
    """They keep their processes; their logs and folders move to the run's."""
    runs_dir = tmp_path / "runs"
    config = compose(["conf=smoke", f"runs_dir={runs_dir}", "host.sessions_per_server=2"]).config
    logs = runs_dir / "smoke" / "logs"
    with early_host(config) as early:
        (aside,) = runs_dir.iterdir()
        assert (aside / "env-0.log").exists()
        host = early.take(logs)
        pids = host.pids
        assert early.take(logs) is None
        assert not aside.exists()
        try:
            await host.start()
            assert host.pids == pids
            assert (logs / "env-0.log").exists()
            async with host.session() as session:
                await session.reset({"seed": 1}, LIMIT_S)
        finally:
            await host.close()
    assert [path.name for path in logs.iterdir()] == ["env-0.log"]
    assert not any(map(is_alive, pids))


def test_servers_that_nobody_takes_leave_nothing(tmp_path):
    config = compose(["conf=smoke", f"runs_dir={tmp_path}/a/runs"]).config
    with pytest.raises(ConfigError), early_host(config) as early:
        pids = early._host.pids
        assert all(map(is_alive, pids))
        raise ConfigError("a requirement is not met")
    assert not any(map(is_alive, pids))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    ["env.package=wordel", "host.port=5", "runs_dir=/proc/runs", "env.python=./no/python"],
)
def test_what_cannot_be_launched_early_is_left_to_the_run(tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    with early_host(compose(["conf=smoke", override]).config) as early:
        assert early is None
    assert list(tmp_path.iterdir()) == []


async def test_a_launched_server_whose_port_is_taken_starts_at_another(tmp_path):
    host = ProcessHost(*stub(), tmp_path / "early")
    host.launch()
    host.kill()
    host.move_logs(tmp_path / "logs")
    port = int(host._processes[0].url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        try:
            await host.start()
            assert host.urls[0] != f"http://127.0.0.1:{port}"
            assert (tmp_path / "logs/env-0.log").exists()
        finally:
            await host.close()
