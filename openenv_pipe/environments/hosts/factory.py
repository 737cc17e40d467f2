"""Why a server cannot create its environment: OpenEnv's FACTORY_ERROR hides the exception.

The environment is created once, without a server, in the interpreter and with the variables that
the server has.
"""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FACTORY_ERROR = "FACTORY_ERROR"
TIME_LIMIT_S = 180.0  # importing the openenv library takes long on a busy machine
MAX_LENGTH = 1000  # characters of the exception
# Importing the app makes its server, which is told how to create environments.
CREATE = """
import importlib, sys
sys.path[0] = sys.argv[1]
sys.path.append(sys.argv[2])
from openenv.core.env_server.http_server import HTTPEnvServer
factories, make = [], HTTPEnvServer.__init__
def remember(self, env, *arguments, **keywords):
    factories.append(env)
    make(self, env, *arguments, **keywords)
HTTPEnvServer.__init__ = remember
importlib.import_module(sys.argv[3].partition(":")[0])
factories[-1]()
"""


def creation_error(
    python: Sequence[str], package: Path, app: str, environment: Mapping[str, str]
) -> str:
    """Create the environment of a package in a process of its own; return how that failed.

    app: `package.module:name`.
    Returns the last lines of the process, which name the exception; empty if nothing failed.
    """
    command = [*python, "-c", CREATE, str(package.parent), str(package), app]
    try:
        with tempfile.TemporaryDirectory(prefix="openenv-pipe-env-") as folder:
            done = subprocess.run(
                command,
                env=dict(environment),
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIME_LIMIT_S,
                process_group=0,  # Ctrl-C is for this process alone.
            )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode == 0 else _exception(done.stderr)


def _exception(stderr: str) -> str:
    """Return the exception at the end of a traceback: the lines from the last unindented one on."""
    lines = stderr.rstrip().splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[starts[-1] + 1 :] if starts else lines
    first = next((i for i, line in enumerate(after) if line and not line[0].isspace()), 0)
    return "\n".join(after[first:])[:MAX_LENGTH]
