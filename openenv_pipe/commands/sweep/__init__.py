"""Sweeps: many runs from one command line, one after another or in parallel.

command         a sweep from its command line to its table
job             one run, in the process in which a launcher calls it
prepared        a process from which the runs are forked
shared_servers  servers that one job after another leases
watch           progress of the jobs: a line each, and updates of sweep.json
search          values that Optuna proposes, and jobs that it prunes
folder          the sweep's folder on disk
"""
