"""The server's ASGI application, and `python -m questions.server.app` to run it.

Variables of the process: `QUESTIONS_SCORE` is how answers are scored (default `exact`), and
`QUESTIONS_FOLDER` is where a function of yours is looked for. `QUESTIONS_LIMIT_S` is its time limit
(default 10). `MAX_CONCURRENT_ENVS` limits the sessions (default 256).
"""

import argparse
import os
from functools import partial

import uvicorn
from openenv.core.env_server.http_server import create_app

from ..models import QuestionsAction, QuestionsObservation
from ..scoring import make_score
from .questions_environment import QuestionsEnvironment

score = make_score(
    os.environ.get("QUESTIONS_SCORE", "exact"),
    folder=os.environ.get("QUESTIONS_FOLDER", ""),
    limit_s=float(os.environ.get("QUESTIONS_LIMIT_S", "10")),
)
app = create_app(
    partial(QuestionsEnvironment, score),
    QuestionsAction,
    QuestionsObservation,
    env_name="questions",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "256")),
)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve Questions over OpenEnv's protocol.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        # Compressing small frames costs more than a question.
        ws_per_message_deflate=False,
        # Clients keep their sockets open, so without a limit a shutdown would wait for them.
        timeout_graceful_shutdown=2,
    )


if __name__ == "__main__":
    main()
