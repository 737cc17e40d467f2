"""Sweeps: many runs from one command line, one after another or side by side.

story           the sweep from its command line to its table
job             one run, in the process that a launcher calls it in
shared_servers  servers that one job after another leases
watch           progress of the jobs: a line each, and sweep.json kept up to date
search          values that Optuna proposes, and jobs that it prunes
folder          the sweep's folder on disk
"""
