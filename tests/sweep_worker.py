"""A worker of a sweep whose jobs are files of Python code in the place of run folders.

`python -m tests.sweep_worker CHANNEL SERVERS` replaces the module `worker_process` of sweeps. The
libraries are left out, and the code finds its request to stop as `stop`.
"""

import os
import sys
import time
from pathlib import Path

from openenv_pipe.cli.streams import keep_streams
from openenv_pipe.extras.sweeps import worker_process as worker


def execute(job: worker.WorkerJob, stop: worker.OneStop, _: object) -> None:
    os.environ.update(job.secrets)
    exec(Path(job.run).read_text(), {"stop": stop})


keep_streams()
time.sleep(float(os.environ.get("SECONDS_OF_IMPORTS", "0")))
worker.train = execute
worker.Channel(int(sys.argv[1])).serve(None)  # type: ignore[arg-type]  # the code needs none
