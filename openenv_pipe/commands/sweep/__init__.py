"""Sweeps: many runs from one command line, one after another or side by side.

story    the sweep from its command line to its table
job      one run, in whatever process a launcher calls it
keeper   servers between the jobs that need the same ones
watch    how the jobs do: a line each, and sweep.json kept up to date
search   values that Optuna proposes, and jobs that it gives up
folder   what stays
"""
