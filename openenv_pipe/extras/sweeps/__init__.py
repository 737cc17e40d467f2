"""Sweeps: many runs from one command line, one after another or in parallel.

cli             `train -m`: progress, signals, exit code
schema          the keys of `sweep`
multirun        from a command line with several values to its jobs
command         a sweep from its command line to its table
job             one job, from its overrides to its recorded end
worker          the process that runs one job after another, as the sweep sees it
worker_process  that process
leased_host     servers that jobs of a worker lease in turn
kept_vllm       vLLM's servers, which a worker keeps
watch           progress of the jobs: a line each, and updates of sweep.json
search          values that Optuna proposes, and jobs that it prunes
folder          the sweep's folder on disk
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="sweeps", multirun="openenv_pipe.extras.sweeps.cli:multirun")
