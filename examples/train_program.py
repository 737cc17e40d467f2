"""Train the two roles of two_roles.py, then print how much more reward they get than before."""

import sys
from pathlib import Path

from openenv_pipe import train

PROGRAM = Path(__file__).with_name("two_roles.py").resolve()
SETTINGS = (
    *("agent=program", f"agent.command=['{{python}}','{PROGRAM}']"),
    # Eight letters in an episode: starting a program takes a second, and two calls much less.
    *("env.max_turns=8", "env.tasks.train.reset.turns=8", "env.tasks.eval.reset.turns=8"),
    *("trainer.steps=10", "trainer.tasks_per_step=2", "trainer.group_size=8"),
    *("eval.num_tasks=16", "eval.greedy=false", "eval.baselines=false"),
)

run = train("conf=echo", *SETTINGS, *sys.argv[1:], on_progress=print)
before, after = (run.evals[label].reward.mean for label in ("start", "trained"))
print(f"reward before {before:.3f}, after {after:.3f}")
