"""Evaluate a run's last checkpoint and its start: evaluate_checkpoint.py [RUN]."""

import sys

from openenv_pipe import evaluate, open_run

run = open_run(sys.argv[1] if len(sys.argv) > 1 else "latest")
reports = evaluate(f"{run.path}@start", run, "eval.num_tasks=10", "eval.baselines=false")
for name, report in reports.items():
    print(f"{name}: reward {report.reward.mean:.3f}, {report.num_tasks} tasks")
