"""The server's ASGI application, and `python -m tic_tac_toe.server.app` to run it.

`MAX_CONCURRENT_ENVS` in the process's environment limits the sessions (default 256).
"""

import argparse
import os

import uvicorn
from openenv.core.env_server.http_server import create_app

from ..models import TicTacToeAction, TicTacToeObservation
from .tic_tac_toe_environment import TicTacToeEnvironment

app = create_app(
    TicTacToeEnvironment,
    TicTacToeAction,
    TicTacToeObservation,
    env_name="tic_tac_toe",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "256")),
)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve tic-tac-toe over OpenEnv's protocol.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        # Compressing small frames costs more than a turn of the game.
        ws_per_message_deflate=False,
        # Clients keep their sockets open, so without a limit a shutdown would wait for them.
        timeout_graceful_shutdown=2,
    )


if __name__ == "__main__":
    main()
