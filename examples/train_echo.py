"""Train on the echo environment, then print the path of the run's report."""

import sys

from openenv_pipe import train

run = train("conf=echo", *sys.argv[1:], on_progress=print)
print(run.report)
