"""Run the probes of `env check`: start the server, probe it, stop it, report the findings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from openenv_pipe.commands.findings import Line, Result, Stopwatch, failed
from openenv_pipe.commands.recorded_play import reset
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters import adapter_for
from openenv_pipe.environments.client.metadata import fetch_metadata
from openenv_pipe.environments.client.session import step_aside
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.process import HEALTH_LIMIT_S, UNPROTECTED, ProcessHost
from openenv_pipe.errors import PipeError
from openenv_pipe.extras.lab.check.answers import probe_answers
from openenv_pipe.extras.lab.check.groups import probe_groups
from openenv_pipe.extras.lab.check.held_out import probe_held_out
from openenv_pipe.extras.lab.check.other_paths import describe_unknown_paths
from openenv_pipe.extras.lab.check.protocol import probe_protocol
from openenv_pipe.extras.lab.check.seeds import probe_seeds
from openenv_pipe.extras.lab.check.sessions import probe_memory, probe_sessions, probe_speed
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.check.tasks import probe_tasks
from openenv_pipe.extras.lab.check.validation import probe_validation
from openenv_pipe.extras.lab.episodes import Chooser, random_actions, scripted, session_tools
from openenv_pipe.extras.lab.targets import Target, one_server, open_tasks
from openenv_pipe.system.http import HttpError, fetch
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Task

PROBES: dict[str, Callable[[EnvironmentUnderTest], AsyncIterator[Line]]] = {
    "OpenEnv's validation": probe_validation,
    "protocol": probe_protocol,
    "sessions": probe_sessions,
    "seeds": probe_seeds,
    "rewards": probe_groups,
    "tasks": probe_tasks,
    "held-out tasks": probe_held_out,
    "answers": probe_answers,
    "speed": probe_speed,
    "memory": probe_memory,
}
HEALTH = "/health"
PROTECTED = "other users of this machine cannot use the server: every request needs a random key"


def probe_environment(
    target: Target, *, policy: str | None, num_episodes: int, notify: Callable[[str], None]
) -> list[Line]:
    """Run all probes and return their findings. `notify` receives progress messages.

    Whatever the environment does wrong becomes a line. Nothing is left running or on disk.

    Raises ConfigError and HostError.
    """
    if policy:
        load_callable(policy)  # before a server starts
    return asyncio.run(_check(target, policy, num_episodes, notify))


async def _check(
    target: Target, policy: str | None, num_episodes: int, notify: Callable[[str], None]
) -> list[Line]:
    serving = target.serving
    num_declared = serving.host.sessions_per_server
    notify("starting the server")
    async with one_server(serving, num_sessions=num_declared) as host:
        tasks = await open_tasks(serving.env, "train", host)
        read_policy = partial(_chooser, serving.env, host, tasks[0])
        schema = (await fetch_metadata(host.urls[0], host.access)).action
        tools = await session_tools(serving.env, host, tasks[0], schema)
        choosers = {"random": random_actions(schema, tools)}
        if policy:
            choosers["scripted"] = await read_policy(policy)
        subject = EnvironmentUnderTest(
            env=serving.env,
            host=host,
            tasks=tasks,
            eval_tasks=await open_tasks(serving.env, "eval", host),
            choosers=choosers,
            read_policy=read_policy,
            is_experiment=target.is_experiment,
            unusable_reward=target.unusable_reward,
            num_declared=num_declared,
            num_episodes=num_episodes,
            notify=notify,
        )
        watch = Stopwatch()
        lines = [watch.lap(line) async for line in _probed(subject)]
        if subject.is_lost:
            return lines
        unknown = await describe_unknown_paths(host.urls[0], host.access) if host.urls else None
        if isinstance(host, ProcessHost):
            protected = await host.is_protected()
            result = Result.OK if protected else Result.WARN
            text = PROTECTED if protected else f"it {UNPROTECTED}"
            lines.append(watch.lap(Line("key", result, text)))
        if unknown is not None:
            lines.append(watch.lap(Line("server", Result.OK, unknown)))
        try:
            async with host.session():
                pass
        except PipeError as error:  # The server died; the error has the end of its log.
            lines.append(watch.lap(failed("server", error)))
        return lines


async def _chooser(env: EnvConfig, host: Host, task: Task, policy: str) -> Chooser:
    adapter = await adapter_for(env.adapter, host.urls, host.access)
    async with host.session() as session:
        first = await reset(session, task, env)
        ask = partial(step_aside, session, env.step_timeout_s)
        opening = await adapter.open(first.observation, ask)
        await session.close()
    return scripted(load_callable(policy), adapter, opening)


async def _probed(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Yield the lines of all probes, up to a failure after which the server is silent."""
    names = list(PROBES)
    for place, name in enumerate(names):
        subject.notify(name)
        try:
            async for line in PROBES[name](subject):
                yield line
                subject.is_lost = line.result is Result.FAIL and await _is_silent(subject.host)
                if subject.is_lost:
                    break
        except PipeError as error:
            yield failed(name, error)
            subject.is_lost = await _is_silent(subject.host)
        if subject.is_lost:
            left = names[place + 1 :]
            more = f"; not tested: {', '.join(left)}" if left else ""
            text = (
                f"since then it answers nothing, not even GET {HEALTH} within {HEALTH_LIMIT_S:g} "
                f"s, as if one step or reset blocked all others{more}"
            )
            yield Line("server", Result.FAIL, text)
            return


async def _is_silent(host: Host) -> bool:
    """Return whether the server runs, but answers nothing.

    A server that has died does not count: the check's last line reports it, with its log's end.
    """
    if not host.urls:
        return False
    try:
        async with asyncio.timeout(HEALTH_LIMIT_S):
            await fetch(host.urls[0], HEALTH, timeout_s=2 * HEALTH_LIMIT_S, access=host.access)
    except TimeoutError:
        return True
    except HttpError:
        pass
    return False
