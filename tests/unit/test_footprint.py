"""What `check` says of the disk and the memory that a run will need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.footprint import BYTES_PER_EPISODE_TOKEN, disk_bytes, memory_bytes, tiny_shape

TESTS = Path(__file__).parents[1]
LARGER = [
    *("conf=echo", "model=tiny", "model.hidden_size=256", "model.intermediate_size=768"),
    *("model.num_layers=4", "model.num_heads=4", "model.head_size=64"),
    *("env.max_episode_tokens=256", "trainer.tasks_per_step=2", "trainer.group_size=4"),
]


def needed(*overrides: str) -> int:
    config = compose(["conf=wordle", *overrides]).config
    return disk_bytes(tiny_shape(config.model), config)


def test_the_episodes_of_evaluations_are_counted():
    """By hand: 250 tasks twice, in three stages and by two players."""
    per_episode = compose(["conf=wordle"]).config.env.max_episode_tokens * BYTES_PER_EPISODE_TOKEN
    plain = needed("eval.baselines=false")
    assert needed() - plain == 2 * 500 * per_episode
    assert needed("eval.num_tasks=50", "eval.baselines=false") == plain - 3 * 400 * per_episode
    assert needed("eval.greedy=true", "eval.baselines=false") - plain == 3 * 250 * per_episode
    during = ("eval.during.every=20", "eval.during.num_tasks=50", "eval.during.samples_per_task=1")
    assert needed("eval.baselines=false", *during) - plain == 10 * 50 * per_episode  # 200 steps


def test_devices_in_one_memory_hold_everything_each_and_shards_their_part():
    held = {}
    for devices in (1, 2, 4):
        for parallel in ("data", "fsdp"):
            changes = (f"trainer.devices={devices}", f"trainer.parallel={parallel}")
            config = compose(["conf=wordle", "trainer.optimizer.type=adamw", *changes]).config
            shape = tiny_shape(config.model)
            for in_one_memory in (True, False):
                needed = memory_bytes(shape, config, in_one_memory=in_one_memory)
                held[devices, parallel, in_one_memory] = needed
    kind, one = "gradients and optimizer", held[1, "data", True]
    assert held[1, "fsdp", True] == one == held[1, "data", False]
    assert held[2, "data", True][kind] == 2 * one[kind]
    assert held[2, "data", True]["python and its libraries"] == 2 * one["python and its libraries"]
    assert held[2, "data", False][kind] == one[kind]
    shares = [held[n, "fsdp", False][kind] / one[kind] for n in (2, 4)]
    assert 1.0 > shares[0] > shares[1] > 0.25
    assert held[2, "fsdp", False]["the policy that plays"] == one["weights"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "change",
    [
        "model.autocast=float32",
        "model.autocast=bfloat16",
        "model.lora.rank=8",
        "model.activation_checkpointing=true",
    ],
)
def test_the_memory_of_updates_is_estimated_within_a_fifth(change):
    overrides = [*LARGER, change]
    config = compose(overrides).config
    needed = memory_bytes(tiny_shape(config.model), config, in_one_memory=True)
    del needed["cache of the engine"]  # there is none in the process that is measured
    child = subprocess.run(
        [sys.executable, TESTS / "measure_learner.py", json.dumps(overrides)],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert sum(needed.values()) == pytest.approx(int(child.stdout), rel=0.2)
