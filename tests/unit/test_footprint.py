"""What `check` says of the disk that a run will need."""

from openenv_pipe.config.compose import compose
from openenv_pipe.footprint import BYTES_PER_EPISODE_TOKEN, disk_bytes, tiny_shape


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
