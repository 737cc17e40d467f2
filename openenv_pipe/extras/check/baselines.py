"""Play one episode of each baseline, which `train` evaluates beside the model."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from openenv_pipe.algorithms.agreement import environment_reward
from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import RewardConfig, RunConfig
from openenv_pipe.engines.scripted import ScriptedEngine, ScriptedPolicy
from openenv_pipe.environments.adapters import Adapter
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Episode, Group

LIMIT_S = 60.0  # for one episode


async def try_baselines(
    config: RunConfig, host: Host, adapter: Adapter, splits: Splits, chat: ChatFormat
) -> AsyncIterator[Line]:
    """Yield a line for each baseline. One that fails does not end a run, so its line is a warning.

    Raises HostError: as in training.
    """
    if not config.eval.baselines:
        return
    for name, policy in config.env.baselines.items():
        label = f"baseline {name}"
        rollout = scripted_rollout(config, host, adapter, splits, chat, load_callable(policy))
        try:
            async with asyncio.timeout(LIMIT_S):
                episode = await play_one(config.seed, rollout, rollout.scorer.score)
        except TimeoutError:
            text = f"an episode of {policy} takes more than {LIMIT_S:g} s; evaluations will be slow"
            yield Line(label, Result.WARN, text)
        except ConfigError as error:
            yield Line(label, Result.WARN, f"its episode cannot be played or scored: {error}")
        else:
            yield _line(label, episode, config.reward)


def scripted_rollout(
    config: RunConfig,
    host: Host,
    adapter: Adapter,
    splits: Splits,
    chat: ChatFormat,
    policy: ScriptedPolicy,
) -> RolloutContext:
    """Return the context in which a scripted policy plays, in the model's tokens."""
    return RolloutContext(
        env=config.env,
        loop=LocalRunner(host, adapter),
        splits=splits,
        chat=chat,
        engine=ScriptedEngine(policy),
        scorer=Scorer(config.reward, config.env.success_reward),
    )


async def play_one(
    seed: int,
    rollout: RolloutContext,
    score: Callable[[Group], Coroutine[Any, Any, None]] | None = None,
) -> Episode:
    group, *_ = await play_groups(
        rollout,
        [rollout.splits.eval[0]],
        group_size=1,
        temperature=0.0,
        seed=seed,
        label="check",
        score=score,
    )
    return group.episodes[0]


def _line(label: str, episode: Episode, reward: RewardConfig) -> Line:
    if episode.failed:
        text = (
            f"its episode failed: {episode.error}; if it is its actions that raise on the server, "
            "set env.step_exception=unusable; eval.baselines=false leaves all baselines out"
        )
        return Line(label, Result.WARN, text)
    text = f"reward {episode.reward:.3g} after {len(episode.turns)} turns"
    if any(name not in episode.reward_terms for name in reward.counted):  # of a judge, or relative
        own = environment_reward(episode)
        text = f"the environment's own reward {own:.3g} after {len(episode.turns)} turns"
    if (unusable := next((t.unusable for t in episode.turns if t.unusable), None)) is not None:
        text = f"{text}; a reply of it is unusable: {unusable:.200}"
        return Line(label, Result.WARN, text)
    return Line(label, Result.OK, text)
