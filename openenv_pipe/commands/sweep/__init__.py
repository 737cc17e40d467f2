"""Sweeps: many runs from one command line, one after another or in parallel.

command         a sweep from its command line to its table
job             one job, from its overrides to its recorded end
worker          the process that runs one job after another
shared_servers  servers that jobs of a worker lease in turn
watch           progress of the jobs: a line each, and updates of sweep.json
search          values that Optuna proposes, and jobs that it prunes
folder          the sweep's folder on disk
"""
