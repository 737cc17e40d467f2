"""End the process where nothing else can: a thread is blocked, or another part would end it."""

import os
import sys

from openenv_pipe.errors import PipeError
from openenv_pipe.system.untrusted_text import for_people


def end_at_once(error: PipeError) -> None:
    """Print the error and exit the whole process, from any thread. The run can be resumed."""
    print(f"error: {for_people(str(error))}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
