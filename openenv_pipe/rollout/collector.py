"""Play many episodes at once, one asyncio task each, started in a fixed order."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.adapters.templates import observation_text
from openenv_pipe.errors import FailureError, raise_first
from openenv_pipe.registry import if_command
from openenv_pipe.rollout.context import PLAYER, EpisodeRunner, EpisodeSpec, RolloutContext
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.system.tasks import run_all, start_in
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Episode, Group, Observation, Status, Task

DEATH_SEEN_WITHIN_S = 2.0
MAX_SHOWN = 400  # characters of an observation in an error message
_log = logging.getLogger(__name__)


async def collect_groups(
    context: RolloutContext,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
    seed: int,
    label: str,
    roles: Sequence[Mapping[str, Engine | str]] | None = None,
    count: EpisodeCount | None = None,
) -> list[Group]:
    """Play groups of episodes as `play_groups` does, and score every episode.

    Raises:
        FailureError: all episodes of an environment failed although no server of it died, or none
            had a single turn.
        EngineError, HostError, ConfigError: as `play_groups`.
    """
    before = deaths_of_servers(context)
    groups = await play_groups(
        context,
        tasks,
        group_size=group_size,
        temperature=temperature,
        seed=seed,
        label=label,
        roles=roles,
        count=count,
        score=context.score,
    )
    await accept_groups(context, groups, before)
    return groups


def deaths_of_servers(context: RolloutContext) -> dict[str, int]:
    """Return by environment how many of its servers have died so far."""
    return {env: each.runner.num_deaths for env, each in context.environments.items()}


async def accept_groups(
    context: RolloutContext, groups: Sequence[Group], before: Mapping[str, int]
) -> None:
    """Accept all groups of a step or an evaluation, which have been scored.

    before: the `deaths_of_servers` when their first episode began.

    Raises JudgeError as `Scorer.accept`, and FailureError as `collect_groups`.
    """
    for env, each in context.environments.items():
        own = [group for group in groups if group.task.env == env or not context.parts]
        if own:
            each.scorer.accept(own)
        episodes = [episode for group in own for episode in group.episodes]
        # When a server died, the host's budget of restarts decides whether the run goes on.
        has_failed = bool(episodes) and all(episode.failed for episode in episodes)
        if not (has_failed and await _has_lost_a_server(each.runner, before[env])):
            _reject_total_failure(episodes)


async def play_groups(
    context: RolloutContext,
    tasks: Sequence[Task],
    *,
    group_size: int,
    temperature: float,
    seed: int,
    label: str,
    roles: Sequence[Mapping[str, Engine | str]] | None = None,
    count: EpisodeCount | None = None,
    score: Callable[[Group], Coroutine[Any, Any, None]] | None = None,
) -> list[Group]:
    """Play `group_size` episodes of each task; the groups are in the order of the tasks.

    An episode's sampling seed is a hash of (seed, label, place of its group, member): the members
    of a group differ, equal calls are equal, and `label` (a step, for example) sets calls apart.

    A task of a game of several players has a group for each player that is trained, whose episodes
    are labelled with the player.

    roles: who plays each player in the game of each task; None: as its context says.
    count: counts the episodes that are finished; its total is the caller's.
    score: called with each group as soon as its episodes have ended, while others are played.

    Raises EngineError, HostError, ConfigError: the rollouts cannot go on. An episode whose session
    fails is data instead: it has the status ERROR.
    """
    num_episodes = len(tasks) * group_size
    limit = min(_num_sessions(context, tasks, group_size), context.engine.max_episodes)
    started_s = time.monotonic()
    _log.debug("%s: playing %d episodes, %d at a time", label, num_episodes, limit)
    roles = roles or [context.of(task).roles for task in tasks]
    first_number = context.engine.begin_rollouts(num_episodes, limit)
    specs = [
        EpisodeSpec(
            task=task,
            seed=episode_seed(seed, label, index, member),
            temperature=temperature,
            number=first_number + index * group_size + member,
            member=member,
            group=f"{label}/{index}",
            group_size=group_size,
            group_seed=group_seed(seed, label, index),
            roles=roles[index],
        )
        for index, task in enumerate(tasks)
        for member in range(group_size)
    ]
    queue = iter(specs)
    try:
        async with asyncio.TaskGroup() as workers:
            batch = _RolloutBatch(specs, score, workers, count or EpisodeCount())
            for _ in range(limit):
                start_in(workers, _play_in_turn(context, queue, batch))
    except BaseExceptionGroup as errors:
        raise_first(errors)
    groups = batch.groups()
    _log.debug("%s: played them in %.1f s", label, time.monotonic() - started_s)
    return groups


def _num_sessions(context: RolloutContext, tasks: Sequence[Task], group_size: int) -> int:
    """Return how many of the episodes find a session at once, whichever of them are played.

    The engine decodes this many together, so none of them may wait for another's session.
    """
    num_episodes = Counter(group_size * [task.env for task in tasks])
    limits = {task.env: context.of(task).runner.capacity for task in tasks}
    too_few = [limits[env] for env, count in num_episodes.items() if count > limits[env]]
    return min([num_episodes.total(), *too_few])


async def _play_in_turn(
    context: RolloutContext, queue: Iterator[EpisodeSpec], batch: "_RolloutBatch"
) -> None:
    """Play one episode after another until none is left; several workers do so at once."""
    for spec in queue:
        own = context.of(spec.task)
        episode = await own.runner.play(own, spec)
        context.engine.end_episode(spec.number)  # not after an error, which ends the rollout batch
        batch.add(spec, episode)


class _RolloutBatch:
    """The groups of a rollout batch, each made and scored when its last episode has ended."""

    def __init__(
        self,
        specs: Sequence[EpisodeSpec],
        score: Callable[[Group], Coroutine[Any, Any, None]] | None,
        tasks: asyncio.TaskGroup,
        count: EpisodeCount,
    ) -> None:
        # For each member its episode, or in a game of several players one per trained player.
        self._episodes: dict[str, list[list[Episode]]] = {spec.group: [] for spec in specs}
        self._ended: dict[str, list[Group]] = {}
        self._score = score
        self._tasks = tasks
        self._count = count

    def add(self, spec: EpisodeSpec, episode: Episode) -> None:
        self._count.finished += 1
        members = self._episodes[spec.group]
        members.append([episode, *episode.others])
        episode.others = []
        if len(members) < spec.group_size:
            return
        members.sort(key=lambda each: each[0].member)
        groups = [
            Group(
                id=f"{spec.group}/{episodes[0].task.labels[PLAYER]}" if spec.roles else spec.group,
                task=episodes[0].task,  # a client may have brought another one than the spec's
                episodes=list(episodes),
                seed=spec.group_seed,
            )
            for episodes in zip(*members, strict=True)
        ]
        if self._score is None:
            self._ended[spec.group] = groups
        else:
            start_in(self._tasks, self._score_groups(spec, groups, self._score))

    async def _score_groups(
        self,
        spec: EpisodeSpec,
        groups: list[Group],
        score: Callable[[Group], Coroutine[Any, Any, None]],
    ) -> None:
        await run_all(score(group) for group in groups)
        self._ended[spec.group] = groups

    def groups(self) -> list[Group]:
        """Return the groups in the order of their tasks, and of the players of a game.

        Raises FailureError if a group was not played and scored to its end, whatever the cause.
        """
        if num_left := len(self._episodes) - len(self._ended):
            raise FailureError(
                f"{num_left} of {len(self._episodes)} groups of tasks were not played "
                "and scored to their end, although nothing stopped the run; user code may have "
                "cancelled tasks of the run's event loop"
            )
        return [group for name in self._episodes for group in self._ended[name]]


async def _has_lost_a_server(runner: EpisodeRunner, num_deaths: int) -> bool:
    """Return whether a server died since there were `num_deaths`.

    A server's end is noticed a moment after that of its episodes, so this waits for it.
    """
    latest = time.monotonic() + DEATH_SEEN_WITHIN_S
    while runner.num_deaths == num_deaths and time.monotonic() < latest:
        await asyncio.sleep(DEATH_SEEN_WITHIN_S / 20)
    return runner.num_deaths > num_deaths


def _reject_total_failure(episodes: Sequence[Episode]) -> None:
    """Raise FailureError if no episode can be used; single failed episodes are only recorded."""
    if any(episode.status.is_of_client for episode in episodes):
        return  # Other clients may do better.
    if episodes and all(episode.failed for episode in episodes):
        error = str(episodes[0].error)
        advice = if_command("check", "; `openenv-pipe check` tries the environment alone")
        if "EXECUTION_ERROR" in error:
            advice += (
                "; if it is the actions that raise there, env.step_exception=unusable takes them "
                "as mistakes of the policy"
            )
        raise FailureError(f"all {len(episodes)} episodes failed, the first with: {error}{advice}")
    if not episodes or any(episode.turns for episode in episodes):
        return
    played = [episode for episode in episodes if not episode.failed]
    if any(each.after_a_move and each.status is not Status.TOKEN_LIMIT for each in played):
        return  # A move of another player ended the game before the first turn of this one.
    if all(episode.status is Status.DONE for episode in played):
        raise FailureError(done_at_reset(played[0].first_observation))
    raise FailureError(
        f"all {len(episodes)} episodes ended before their first turn, because the first messages "
        "leave no room for a reply; raise env.max_episode_tokens, or cut observations by "
        "env.max_observation_tokens" + if_command("check", " (`openenv-pipe check` measures both)")
    )


def done_at_reset(observation: Observation) -> str:
    """Return the error of an environment whose episodes are all done at their reset."""
    return (
        "every episode is done at its reset, with the observation "
        f"{shortened(observation_text(observation), MAX_SHOWN)}; the environment may need a key or "
        "data (env.variables), or reset keywords (env.tasks.train.reset)"
    )


def episode_seed(seed: int, label: str, group: int, member: int) -> int:
    """Return a seed below 2**63 for one episode."""
    digest = hashlib.sha256(f"{seed}/{label}/{group}/{member}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def group_seed(seed: int, label: str, group: int) -> int:
    """Return a seed below 2**62 for requests that sample for several members of a group."""
    digest = hashlib.sha256(f"{seed}/{label}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
