"""docs/metrics.md lists every metric that a step can have."""

import re
from pathlib import Path

from fakes import all_episodes, collect, plain_sample, run_config, tiny_policy

from openenv_pipe.algorithms.agreement import MEASURES
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.engines.vllm.server_metrics import COUNTERS, GAUGES
from openenv_pipe.learner.learner import Learner
from openenv_pipe.rollout.metrics import summarise_groups, summarise_signal, summarise_skipped
from openenv_pipe.types import Judgement

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """Return the names in the first column of the page's tables."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


async def test_what_a_step_says_is_documented():
    policy = tiny_policy(ends=True)
    groups = await collect(policy)
    for episode in all_episodes(groups):
        episode.reward_terms = {"env": episode.reward, "ruler": episode.member / 8}
        place = float(episode.member % 2)
        said = Judgement(explanation="good", num_calls=1, positions=[place], scores=[place])
        episode.judgements = {"ruler": said}
    changes = {
        "trainer.loss.correction": {"type": "mask", "low": 0.5, "high": 2.0},
        "trainer.loss.entropy_coef": 0.1,
        "trainer.loss.off_policy_limit": 0.1,
        "trainer.replay": {"coef": 0.1, "size": 1, "min_reward": None, "per_step": 1},
        "trainer.loss.kl": {
            "coef": 0.1,
            "reference": None,
            "estimator": "k3",
            "importance_weights": True,
            "refresh_every": None,
            "hint": None,
        },
    }
    learner = Learner(policy, run_config(changes).trainer, max_episode_tokens=120, seed=0)
    samples = [plain_sample(episode) for episode in all_episodes(groups)]
    summary = summarise_groups(groups)
    names = set(summary) | set(summarise_signal(3, 4, summary)) | set(summarise_skipped(groups))
    names |= set(learner.update(samples, 1, Uncomputed(), samples[:1]))
    assert "tokens/replay" in names
    names = {re.sub(r"^(reward|judge)/(env|ruler)\b", r"\1/NAME", name) for name in names}
    assert {f"judge/NAME/{measure}" for measure in MEASURES} <= names
    assert names <= documented()
    assert "reward/NAME" in documented()
    assert set(GAUGES) | set(COUNTERS) <= documented()


def test_no_name_is_listed_twice():
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) == len(set(names)) > 40
