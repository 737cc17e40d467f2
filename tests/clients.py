"""Clients of a training server, and the server, in one process: only the engine is scripted."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fakes import FakeHost, Play, rollout_context, run_config
from ports import lasting_port
from programs import RepliesEngine, two_steps

from openenv_pipe.client import AsyncClient
from openenv_pipe.extras.agents.clients.player import serving_clients
from openenv_pipe.extras.agents.schema import ClientAgentConfig
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rollout import collect_groups
from openenv_pipe.types import Group

CHAT = ChatFormat(build_tokenizer())
TOKEN = "the-token-of-the-tests"
RUN = "echo/0001"


def client_config(**changes: Any) -> ClientAgentConfig:
    values = {
        "type": "client",
        "host": "127.0.0.1",
        "port": lasting_port(),
        "token": TOKEN,
        "group_timeout_s": 1000.0,
        "max_calls": 32,
        "max_tokens": None,
    }
    return ClientAgentConfig.model_validate({**values, **changes})


class Server:
    """A rollout context that clients play, and what they need to reach it."""

    def __init__(self, context: Any, url: str, engine: RepliesEngine) -> None:
        self.context = context
        self.url = url
        self.engine = engine

    def client(self, token: str | None = TOKEN) -> AsyncClient:
        return AsyncClient(self.url, token)

    def collect(
        self, *, num_tasks: int = 1, group_size: int = 2, step: int = 1
    ) -> asyncio.Task[list[Group]]:
        """Begin the groups of a step."""
        tasks = [self.context.splits.train[index] for index in range(num_tasks)]
        collecting = collect_groups(
            self.context,
            tasks,
            group_size=group_size,
            temperature=1.0,
            seed=0,
            label=f"step {step}",
        )
        return asyncio.create_task(collecting)


@asynccontextmanager
async def training_server(
    *replies: str,
    play: Play = two_steps,
    changes: dict[str, Any] | None = None,
    capacity: int = 64,
    scorer: Any = None,
    notify: Callable[[str], None] = lambda line: None,
    **agent: Any,
):
    """Yield a server whose model gives `replies`."""
    config = run_config({"env.max_episode_tokens": 400, **(changes or {})})
    engine = RepliesEngine(CHAT, *(replies or ("yes",)))
    context = rollout_context(config, FakeHost(play, capacity=capacity), chat=CHAT, engine=engine)
    if scorer is not None:
        context = replace(context, scorer=scorer)
    agent_config = client_config(**agent)
    serving = serving_clients(context.loop, agent_config, config.reward, RUN, notify)
    async with serving as clients:
        url = f"http://127.0.0.1:{agent_config.port}"
        yield Server(replace(context, agents=clients), url, engine)
