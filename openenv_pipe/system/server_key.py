"""The key of a server that this program starts, and what makes the server ask for it."""

import secrets
from pathlib import Path

from openenv_pipe.system.secrets import remember_secrets

# A folder for the server's PYTHONPATH. Nothing in it imports this package.
SERVER_SIDE = Path(__file__).with_name("server_side")
ENV_KEY, ENV_PORT = "OPENENV_PIPE_KEY", "OPENENV_PIPE_PORT"  # variables of an environment's server


def new_key(whose: str) -> str:
    """Return a random key, which logs and errors do not show. whose: such as "a vLLM server"."""
    key = secrets.token_urlsafe(32)
    remember_secrets({key: f"the key of {whose}"})
    return key
