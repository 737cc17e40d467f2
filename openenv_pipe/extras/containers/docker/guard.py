"""The guard process, which removes the containers of a run when the run has ended or died.

    python -m openenv_pipe.extras.containers.docker.guard OWNER FOLDER

`start_guard.py` starts it as a `ManagedProcess`, which sends it SIGTERM when the run ends or dies.
Until then it only waits, without loading Docker's SDK. OWNER is the label of the containers to
remove, and FOLDER the folder of their sockets.
"""

import shutil
import signal
import sys
import time
from pathlib import Path

READY = "guarded"  # a file in FOLDER; the run may start containers once it exists
PAUSE_S = 0.2


def main() -> None:
    owner, folder = sys.argv[1:]
    # An earlier SIGTERM would end this process without removing anything.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Path(folder, READY).touch()
    signal.sigwait({signal.SIGTERM})
    from openenv_pipe.extras.containers.docker.daemon import (
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
            time.sleep(PAUSE_S)  # further containers may just be starting or being removed
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
