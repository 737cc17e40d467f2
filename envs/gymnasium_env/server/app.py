"""The server's ASGI application, and `python -m gymnasium_env.server.app` to run it.

Variables of the process: `GYM_ID` is the environment's id (default `FrozenLake-v1`), `GYM_KWARGS` a
JSON object of keywords of `gymnasium.make`, and `GYM_FOLDER` where the module of `module:id` is
looked for. `MAX_CONCURRENT_ENVS` limits the sessions (default 256).
"""

import argparse
import os
import sys
from functools import partial

import uvicorn
from openenv.core.env_server.http_server import create_app

from ..models import GymnasiumObservation
from ..source import Source
from ..spaces import action_model
from .gymnasium_environment import GymnasiumEnvironment

try:
    source = Source(
        os.environ.get("GYM_ID", "FrozenLake-v1"),
        os.environ.get("GYM_KWARGS", "{}"),
        os.environ.get("GYM_FOLDER", ""),
    )
    action_type = action_model(source.action_space)
except ValueError as error:
    sys.exit(str(error))  # A run shows the end of this log: the reason, without a traceback.
app = create_app(
    partial(GymnasiumEnvironment, source),
    action_type,
    GymnasiumObservation,
    env_name="gymnasium",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "256")),
)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve Gymnasium over OpenEnv's protocol.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        # Compressing small frames costs more than a turn of a small environment.
        ws_per_message_deflate=False,
        # Clients keep their sockets open, so without a limit a shutdown would wait for them.
        timeout_graceful_shutdown=2,
    )


if __name__ == "__main__":
    main()
