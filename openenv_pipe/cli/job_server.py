"""The process from which a sweep forks its runs: `python -m openenv_pipe.cli.job_server`.

It imports once what every run imports, and starts no thread and no device. `system/fork_server.py`
adds the arguments.
"""

import os
import sys
from importlib import import_module

from openenv_pipe.cli import main as cli
from openenv_pipe.system.fork_server import serve
from openenv_pipe.system.garbage import collect_rarely

# What a run imports before its first step, or at its end.
MODULES = ("openenv_pipe.pipeline.servers", "openenv_pipe.pipeline", "aiohttp", "matplotlib.figure")


def main() -> None:
    """Import, and do the job that a fork is asked for."""
    command = serve(sys.argv[1:], prepare)
    if is_cuda_lost():
        os.execvp(command[0], command)
    before = command.index("job")
    sys.argv = [cli.__file__, *command[before:]]
    cli.main()


def prepare() -> None:
    """Import what runs need."""
    collect_rarely()  # until the fork has loaded its libraries
    cli.set_library_defaults()
    for name in MODULES:
        import_module(name)


def is_cuda_lost() -> bool:
    """True if an import has used CUDA, which a fork could not use after that."""
    import torch

    return torch.cuda._is_in_bad_fork()


if __name__ == "__main__":
    main()
