"""Removes the containers of a run whose process is gone, however it went.

    python -m openenv_pipe.environments.hosts.docker.guard OWNER FOLDER

`hosts.docker` starts it under a guardian (`process.ManagedProcess`), which sends SIGTERM when the
run ends it or has died. Until then it only waits, and Docker's SDK is not even loaded. OWNER is
the label of the containers to remove, FOLDER that of their sockets.
"""

import shutil
import signal
import sys
import time
from pathlib import Path

READY = "guarded"  # a file in FOLDER: from now on the run may start containers
PAUSE_S = 0.2


def main() -> None:
    owner, folder = sys.argv[1:]
    # A SIGTERM that came before this would end us with our work undone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Path(folder, READY).touch()
    signal.sigwait({signal.SIGTERM})
    from openenv_pipe.environments.hosts.docker.daemon import (
        OWNER,
        connected,
        owned_containers,
        remove,
    )

    with connected() as client:
        while ours := [
            owned.container
            for owned in owned_containers(client)
            if owned.container.labels[OWNER] == owner
        ]:
            for container in ours:
                remove(container)
            time.sleep(PAUSE_S)  # one that was being started, or removed by another, is there still
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
