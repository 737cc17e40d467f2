"""Measures the memory of updates; `test_memory_estimate` runs it in a process of its own.

Reads overrides as a JSON list, builds that policy, updates it twice, and prints the peak memory of
the process in bytes.
"""

import json
import random
import sys
from pathlib import Path

import torch
from fakes import random_sample

from openenv_pipe.config.compose import compose
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.load import load_policy
from openenv_pipe.system.process_settings import keep_freed_memory


def main() -> None:
    keep_freed_memory()
    config = compose(json.loads(sys.argv[1])).config
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    limit = config.env.max_episode_tokens
    learner = Learner(policy, config.trainer, max_episode_tokens=limit, seed=0)
    draw = random.Random(0)
    num_samples = config.trainer.tasks_per_step * config.trainer.group_size
    samples = [random_sample(draw, [(limit // 2, limit - limit // 2)]) for _ in range(num_samples)]
    for step in (1, 2):
        learner.update(samples, step)
    lines = Path("/proc/self/status").read_text().splitlines()
    (most,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    print(int(most) * 1024)


if __name__ == "__main__":
    main()
