"""Stop a run once its reward is good enough, then go on: stop_early.py TARGET [OVERRIDES]."""

import sys

from openenv_pipe import train


class StopAtReward:
    """Stops when the mean reward of the last `num_steps` GRPO steps reaches the target."""

    def __init__(self, target, num_steps=3):
        self.target = target
        self.num_steps = num_steps

    def on_step(self, run, metrics):
        rewards = [record["reward/mean"] for record in run.metrics][-self.num_steps :]
        mean = sum(rewards) / len(rewards)
        if len(rewards) == self.num_steps and mean >= self.target:
            return f"the mean reward is {mean:.3f}"
        return None  # go on


run = train("conf=echo", *sys.argv[2:], callbacks=[StopAtReward(float(sys.argv[1]))])
print(f"{run.id} {run.status} after {len(run.metrics)} steps: {run.cause}")

if run.cause:
    run = train(resume=run)  # without the callback, so to the last step
    print(f"{run.id} {run.status} after {len(run.metrics)} steps")
