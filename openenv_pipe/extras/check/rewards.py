"""Try the user's reward functions, the numbers that environments report, and each baseline."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from openenv_pipe.algorithms.agreement import environment_reward
from openenv_pipe.commands.findings import Line, Result, failed
from openenv_pipe.commands.recorded_play import PlayedEpisode, RecordedPlayer
from openenv_pipe.config.schema import PythonTerm, RewardConfig, RunConfig
from openenv_pipe.engines.scripted import ScriptedEngine, ScriptedPolicy
from openenv_pipe.environments.adapters import Adapter
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.random_policy import random_action
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.rewards import Scorer
from openenv_pipe.rewards.reported_numbers import last_number, number_paths
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.system.resources import did_you_mean, load_callable
from openenv_pipe.types import Episode, Group, Observation, Opening

LIMIT_S = 60.0  # for one episode


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedEnvironment:
    """What one episode of a scripted policy is played with."""

    config: RunConfig
    host: Host
    adapter: Adapter
    splits: Splits
    chat: ChatFormat | None  # None: for an engine that takes messages

    async def play(self, policy: ScriptedPolicy, *, is_scored: bool = False) -> Episode:
        """Play a task of the evaluation in the model's tokens; without `chat`, in none."""
        if self.chat is None:
            play = PlayedEpisode(task=self.splits.eval[0])
            engine = ScriptedEngine(policy)
            player = RecordedPlayer(self.config.env, engine, self.adapter, play)
            return await player.play(self.host)
        scorer = Scorer(self.config.reward, self.config.env.success_reward)
        rollout = RolloutContext(
            env=self.config.env,
            loop=LocalRunner(self.host, self.adapter),
            splits=self.splits,
            chat=self.chat,
            engine=ScriptedEngine(policy),
            scorer=scorer,
        )
        group, *_ = await play_groups(
            rollout,
            [self.splits.eval[0]],
            group_size=1,
            temperature=0.0,
            seed=self.config.seed,
            label="check",
            score=scorer.score if is_scored else None,
        )
        return group.episodes[0]


async def try_baselines(tried: TriedEnvironment) -> AsyncIterator[Line]:
    """Yield a line for each baseline. One that fails does not end a run, so its line is a warning.

    Raises HostError: as in training.
    """
    config = tried.config
    if not config.eval.baselines:
        return
    for name, path in config.env.baselines.items():
        label, policy = f"baseline {name}", load_callable(path)
        try:
            async with asyncio.timeout(LIMIT_S):
                episode = await tried.play(policy, is_scored=True)
        except TimeoutError:
            text = f"an episode of {path} takes more than {LIMIT_S:g} s; evaluations will be slow"
            yield Line(label, Result.WARN, text)
        except ConfigError as error:
            yield Line(label, Result.WARN, f"its episode cannot be played or scored: {error}")
        else:
            yield _baseline_line(label, episode, config.reward)


def _baseline_line(label: str, episode: Episode, reward: RewardConfig) -> Line:
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


def random_reply(observations: Sequence[Observation], draw: random.Random, opening: Opening) -> str:
    """A scripted policy for every adapter: a random action, or a text if any text is an action."""
    if opening.tools or opening.action_schema:
        return random_action(observations, draw, opening=opening)
    return "an example"


def no_action(observations: Sequence[Observation], draw: random.Random) -> str:
    """A scripted policy whose replies are unusable, unless the adapter takes any text as action."""
    return "???"


async def try_rewards(tried: TriedEnvironment) -> AsyncIterator[Line]:
    """Yield a line for each reward term that a function of the user computes, and for each of
    `env.metrics` that no observation has.

    They are tried with an episode of random actions, with one of replies that are not actions, and
    with one of each baseline. Raises HostError: as in training.
    """
    config = tried.config
    terms = {k: term for k, term in config.reward.terms.items() if isinstance(term, PythonTerm)}
    if not terms and not config.env.metrics:
        return
    policies: dict[str, ScriptedPolicy] = {
        "random actions": random_reply,
        "replies that are not actions": no_action,
    }
    if config.eval.baselines:
        policies |= {name: load_callable(path) for name, path in config.env.baselines.items()}
    episodes = {}
    for name, policy in policies.items():
        if (episode := await _play(tried, policy)) is not None:
            episodes[name] = episode
    for name, term in terms.items():
        reward = config.reward.model_copy(update={"terms": {name: term}, "transforms": {}})
        yield await _line(name, term, Scorer(reward, config.env.success_reward), episodes)
    seen = [each for episode in episodes.values() for each in episode.observations]
    for name, path in config.env.metrics.items():
        if seen and last_number(seen, path) is None:
            yield _no_number(name, path, number_paths(seen))


async def _play(tried: TriedEnvironment, policy: ScriptedPolicy) -> Episode | None:
    """Return an episode of the policy; None if it fails, which other checks report."""
    try:
        async with asyncio.timeout(LIMIT_S):
            episode = await tried.play(policy)
    except (ConfigError, TimeoutError):
        return None
    return None if episode.failed else episode


def _no_number(name: str, path: str, found: Sequence[str]) -> Line:
    known = f"; the numbers in them are {', '.join(found[:8])}" if found else ""
    text = f"env.metrics.{name}={path}: no observation has a number there"
    text += f"{did_you_mean(path, found)}{known}"
    return Line(f"metric env/{name}", Result.WARN, text)


async def _line(
    name: str, term: PythonTerm, scorer: Scorer, episodes: Mapping[str, Episode]
) -> Line:
    label = f"reward {name}"
    returned = []
    for policy, played in episodes.items():
        episode = replace(played)  # no function sees what another one returned
        group = Group(id="check", task=episode.task, episodes=[episode])
        try:
            async with asyncio.timeout(LIMIT_S):
                await scorer.score(group)
        except TimeoutError:
            text = f"{term.target} takes more than {LIMIT_S:g} s for an episode of {policy}"
            return Line(label, Result.WARN, f"{text}; training waits for it after each step")
        except ConfigError as error:
            return failed(label, error)
        value = "None" if episode.unscored else f"{episode.reward_terms[name]:.3g}"
        returned.append(f"{value} for an episode of {policy}")
    if not returned:
        text = f"no episode could be played to call {term.target} with; look at the other lines"
        return Line(label, Result.WARN, text)
    text = f"{term.target} returns {', '.join(returned)}"
    if any(each.startswith("None") for each in returned):
        text += "; an episode without a value has no reward, and is not trained on"
        return Line(label, Result.WARN, text)
    return Line(label, Result.OK, text)
