"""Train with several learning rates, and print what each one reached."""

import sys

from openenv_pipe import train

for lr in (1e-3, 4e-3):
    run = train("conf=echo", f"trainer.optimizer.lr={lr}", *sys.argv[1:])
    before, after = run.evals["start"].reward, run.evals["trained"].reward
    print(
        f"{run.id} lr={lr:g}: reward {before.mean:.3f} -> {after.mean:.3f} "
        f"({after.low:.3f}..{after.high:.3f})"
    )
