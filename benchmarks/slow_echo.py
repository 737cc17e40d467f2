"""Serve the environment `echo` with slow steps, for `asynchrony.py`.

python benchmarks/slow_echo.py PORT STEP_S
"""

import asyncio
import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))

from echo.models import EchoAction, EchoObservation
from echo.server.echo_environment import EchoEnvironment

STEP_S = float(sys.argv[2])


class SlowEcho(EchoEnvironment):
    """Sleeps before each answer, like an environment that calls another service."""

    async def step_async(self, *arguments, **keywords):
        await asyncio.sleep(
            STEP_S
        )  # Sleeping asynchronously delays one session; blocking would delay all of them.
        return await super().step_async(*arguments, **keywords)


app = create_app(SlowEcho, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=256)
uvicorn.run(app, port=int(sys.argv[1]), ws_per_message_deflate=False, log_level="warning")
