"""The target of an `openenv-pipe env` command, and one running server of it."""

import asyncio
import math
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openenv_pipe.config.compose import compose, compose_env
from openenv_pipe.config.schema import (
    EnvConfig,
    RewardConfig,
    ServingConfig,
    TaskServer,
    UnusableTerm,
)
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import open_session
from openenv_pipe.environments.tasks import TaskSet, read_known_sets
from openenv_pipe.environments.tasks.server import server_rows
from openenv_pipe.environments.tasks.sets import ListedRows
from openenv_pipe.errors import ConfigError, HostError, ServerFullError
from openenv_pipe.system.resources import did_you_mean, find_env, group_options

IMAGE = re.compile(r"[^./~].*[:@][^/]+")  # `host:5000/name`, without tag or digest, does not match
SLOT_LIMIT_S = 5.0  # for a server to free the slot of a closed session
SLOT_POLL_S = 0.05
# The defaults for a target without a block: actions as JSON, and tasks that differ in the seed.
NO_BLOCK = (
    "env=base",
    "env/adapter=json",
    "env.tasks.train.num_tasks=1000",
    "env.tasks.eval.num_tasks=100",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    serving: ServingConfig
    is_experiment: bool
    policy: str | None = None  # of the experiment's warm start
    unusable_reward: float = 0.0  # of one unusable reply in the experiment
    reward: RewardConfig | None = None  # of the experiment


def find_target(name: str, overrides: Sequence[str]) -> Target:
    """Find what `name` means.

    It is a block `env=name`, an experiment `conf=...`, a package's folder, a server's URL, or an
    image with its tag or digest. Raises ConfigError: it is none of these, or an override is wrong.
    """
    if "=" in name:
        overrides = [name, *overrides]
        if any(each.startswith("conf=") for each in overrides):
            config = compose(overrides).config
            return Target(
                serving=ServingConfig(env=config.env, host=config.host),
                is_experiment=True,
                policy=config.trainer.warm_start.source.scripted_policy,
                unusable_reward=math.fsum(
                    term.weight
                    for term in config.reward.terms.values()
                    if isinstance(term, UnusableTerm)
                ),
                reward=config.reward,
            )
    else:
        overrides = [*_overrides(name), *overrides]
    return Target(serving=compose_env(overrides), is_experiment=False)


def _overrides(name: str) -> list[str]:
    """Return the overrides for a target that is not an override itself."""
    if "://" in name:
        return [*NO_BLOCK, "env.name=remote", "host=attach", f"host.urls=['{name}']"]
    if IMAGE.fullmatch(name) and not Path(name).exists():
        return [*NO_BLOCK, "env.name=image", "host=docker", f"host.image='{name}'"]
    if "/" in name or name.startswith("."):
        package = find_env(name)
        return [*NO_BLOCK, f"env.name={package.name}", f"env.package='{package}'"]
    blocks = group_options("env")
    if name not in blocks:
        raise ConfigError(
            f"{name!r} is not an environment; there are {', '.join(blocks)}"
            f"{did_you_mean(name, blocks)}; or give conf=NAME, the folder of a package such as "
            "./my_env, the URL of a server, or an image with its tag, such as my_env:latest; "
            "`openenv-pipe env find` lists environments, and `openenv-pipe env new NAME` writes one"
        )
    return [f"env={name}"]


async def open_tasks(env: EnvConfig, split: Literal["train", "eval"], host: Host) -> TaskSet:
    known = await asyncio.to_thread(read_known_sets, env.tasks)
    if split in known:
        return known[split]
    config: TaskServer = getattr(env.tasks, split)
    rows = await server_rows(host.urls[0], host.access, config.split, f"env.tasks.{split}")
    return ListedRows(split, config, rows, f"split {config.split!r} of the server")


async def open_when_free(env: EnvConfig, host: Host) -> Session:
    """Open a session; the slot of one that was just closed may still be taken for a moment."""
    latest_s = time.monotonic() + SLOT_LIMIT_S
    while True:
        try:
            return await open_session(env, host.urls[0], host.access)
        except ServerFullError:
            if time.monotonic() > latest_s:
                raise
        await asyncio.sleep(SLOT_POLL_S)


@asynccontextmanager
async def one_server(
    serving: ServingConfig, *, num_sessions: int = 1, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Host]:
    """Start a host of one server that may have `num_sessions` sessions.

    The host's pool has one session, and holds none while unused, so sessions opened beside the pool
    may take all. The server's logs are deleted at the end. Raises ConfigError and HostError.
    """
    told = {"MAX_CONCURRENT_ENVS": str(num_sessions), **serving.env.variables, **(variables or {})}
    one = ServingConfig(
        env=serving.env.model_copy(update={"variables": told}), host=serving.host.for_one_session()
    )
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-env-") as logs:
        host = build_host(one, Path(logs))
        try:
            await host.start()
            async with host.session() as session:
                await session.close()
            yield host
        except HostError as error:
            if error.log is None:
                raise
            text = str(error).replace(f" (log: {error.log})", "")  # The log is deleted.
            raise HostError(text) from error
        finally:
            await host.close()
