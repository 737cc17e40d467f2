"""Try the environment: its servers start, open all sessions, and play a task the same twice."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode, play_scripted, reset
from openenv_pipe.config.schema import EnvConfig, RunConfig, TaskDataset, TaskFile, TaskShare
from openenv_pipe.engines.scripted import ScriptedPolicy
from openenv_pipe.environments.adapters import Adapter, adapter_for
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.client.session import Session, step_aside
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.tasks import (
    Splits,
    build_order,
    count_labels,
    known_splits,
    open_splits,
    split_warnings,
)
from openenv_pipe.errors import ConfigError, SessionError
from openenv_pipe.extras.check.rewards import LIMIT_S, TriedEnvironment, try_baselines, try_rewards
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.hub import is_on_this_machine
from openenv_pipe.models.load import load_chat as load_chat_format
from openenv_pipe.rollout.collector import done_at_reset
from openenv_pipe.rollout.conversation import cut_messages
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Observation, Opening, Task

MAX_LABELS = 10  # of a column, the most frequent first
MAX_ROUNDS = 4  # one after the other, that a step's episodes may take without a warning
Trajectory = list[tuple[Any, ...]]


def load_chat(config: RunConfig) -> ChatFormat | None:
    """Load the chat format; None if this machine has no tokenizer that training can use."""
    if not config.engine.capabilities.needs_tokenizer:
        return None
    try:
        return load_chat_format(config.model) if is_on_this_machine(config.model) else None
    except ConfigError:  # The requirement `chat` reports it.
        return None


def tokens_line(env: EnvConfig, chat: ChatFormat, openings: Sequence[Opening]) -> Line:
    """Compare the first messages with env.max_episode_tokens, as training will see them."""
    counts = [_count(env, chat, opening) for opening in openings]
    shortest, longest = min(counts), max(counts)
    limit = env.max_episode_tokens
    size = str(longest) if shortest == longest else f"{shortest} to {longest}"
    text = f"first messages have {size} tokens; env.max_episode_tokens={limit}"
    measured = {"shortest": shortest, "longest": longest}
    room = limit - longest
    if room >= env.max_reply_tokens:
        return Line("tokens", Result.OK, f"{text} leaves {room} for what follows", measured)
    tools = _about_tools(env, chat, openings[counts.index(longest)])
    advice = "raise it if the model allows more, or cut observations by env.max_observation_tokens"
    if shortest >= limit:
        text = f"{text} leaves no room for a reply{tools}; {advice}"
        return Line("tokens", Result.FAIL, text, measured)
    text = (
        f"{text} leaves {max(0, room)} for a reply, which may have "
        f"env.max_reply_tokens={env.max_reply_tokens}{tools}; {advice}"
    )
    return Line("tokens", Result.WARN, text, measured)


def _count(env: EnvConfig, chat: ChatFormat, opening: Opening, *, with_tools: bool = True) -> int:
    messages = cut_messages(opening.messages, env.max_observation_tokens, chat.cut)
    return len(chat.first_ids(messages, opening.tools if with_tools else ()))


def _about_tools(env: EnvConfig, chat: ChatFormat, opening: Opening) -> str:
    if not opening.tools:
        return ""
    num_tokens = _count(env, chat, opening) - _count(env, chat, opening, with_tools=False)
    return f" ({num_tokens} of them describe {len(opening.tools)} tools)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    first: Observation
    trajectory: Trajectory
    opening: Opening | None  # None: the episode was done at its reset


def check_environment(config: RunConfig) -> Iterator[Line]:
    """Start each environment's servers, play on them, and stop them.

    Raises ConfigError and HostError.
    """
    for name, each in config.environments.items():
        if each.host.has_environment:
            with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as log_dir:
                lines = asyncio.run(_try_servers(each, Path(log_dir)))
            yield from (
                replace(line, name=f"{line.name} of {name}") if name else line for line in lines
            )


async def _try_servers(config: RunConfig, log_dir: Path) -> list[Line]:
    """Start the servers and open all sessions; play one task three times and another one once,
    and one task with each baseline."""
    known_sets = known_splits(config)
    chat = await asyncio.to_thread(load_chat, config)
    host = build_host(config, log_dir)
    dotted = policy_path(config)
    try:
        await host.start()
        num_servers = len(host.urls)
        splits = await open_splits(config, known_sets, host.urls[0], host.access)
        tasks = splits.train
        build_order(config.env.tasks.order, tasks, config.seed).take(0, 1)
        first, other = tasks[0], tasks[len(tasks) - 1]
        adapter = await adapter_for(config.env.adapter, host.urls, host.access)
        policy = load_callable(dotted) if dotted else None
        play = partial(_play, adapter=adapter, policy=policy, env=config.env)
        async with host.session() as session:
            played = [await play(session, task) for task in (first, other, first)]
        # Later episodes get sessions of their own, because some environments use a seed only once.
        async with host.session() as session:
            played.append(await play(session, first))
        is_played, differ = policy is not None, played[0].trajectory != played[1].trajectory
        if policy is None and not differ and len(tasks) > 1:
            is_played, differ = await _baselines_differ(config, host, adapter, (first, other))
        openings = [each.opening for each in played if each.opening is not None]
        if not openings:
            raise ConfigError(done_at_reset(played[0].first))
        tried = TriedEnvironment(
            config=config, host=host, adapter=adapter, splits=splits, chat=chat
        )
        measured = [line async for line in try_rewards(tried)]
        if chat is not None:
            measured.append(tokens_line(config.env, chat, openings))
            measured += [line async for line in try_baselines(tried)]
    finally:
        await host.close()
    did = "answered" if config.host.type == "attach" else "started, answered and stopped"
    return [
        Line("servers", Result.OK, f"{num_servers} {did}"),
        _sessions_line(config, host.capacity),
        _seed_line(*(played[number].trajectory for number in (0, 2, 3))),
        *_held_out_lines(config, splits),
        *label_lines(config, splits),
        *_tasks_lines(len(tasks), differ=differ, is_played=is_played),
        *measured,
    ]


async def _play(
    session: Session, task: Task, adapter: Adapter, policy: ScriptedPolicy | None, env: EnvConfig
) -> _Played:
    """Play the task with the policy; without a policy, only look at its first observation.

    Raises ConfigError: a template names a field that the observation lacks.
    """
    play = PlayedEpisode(task=task)
    if policy is not None:
        opening = await play_scripted(session, play, policy, adapter, env)
    else:
        play.results.append(await reset(session, task, env))
        ask = partial(step_aside, session, env.step_timeout_s)
        opening = None if play.done else await adapter.open(play.observations[0], ask)
    if play.failure or (play.rejections and not play.actions):
        raise play.failure or play.rejections[0]
    if play.actions:  # The last observation is not shown to a model, but a template has to fit it.
        await awaited(adapter.follow(play.observations[-1]))
    return _Played(first=play.observations[0], trajectory=play.comparable, opening=opening)


def _sessions_line(config: RunConfig, capacity: int) -> Line:
    num_episodes = config.trainer.episodes_per_step
    how = "all at once" if capacity >= num_episodes else f"{capacity} at a time"
    text = f"{capacity} opened; the {num_episodes} episodes of a step are played {how}"
    if capacity * MAX_ROUNDS >= num_episodes:
        return Line("sessions", Result.OK, text)
    advice = "raise host.sessions_per_server as far as a server allows, or use more servers"
    return Line("sessions", Result.WARN, f"{text}, which takes long; {advice}")


def _seed_line(first: Trajectory, again: Trajectory, elsewhere: Trajectory) -> Line:
    if first == again == elsewhere:
        return Line("seeds", Result.OK, "the same task is the same in every session")
    return Line(
        "seeds",
        Result.WARN,
        "the same task with the same seed was not the same twice: a group compares episodes of "
        "different tasks, and a run cannot be repeated; look for a reset keyword that names a "
        "task (env.tasks.*.index_key)",
    )


def _held_out_lines(config: RunConfig, splits: Splits) -> Iterator[Line]:
    if isinstance(config.env.tasks.eval, TaskShare):
        text = f"{len(splits.train)} to train on and {len(splits.eval)} held out, of "
        yield Line("tasks", Result.OK, f"{text}{splits.train.source}")
    for warning in split_warnings(config.env.tasks, splits):
        yield Line("tasks", Result.WARN, warning)


def label_lines(config: RunConfig, splits: Splits) -> Iterator[Line]:
    """Count the tasks of each label of a file's or a data set's rows, in both splits."""
    rows = config.env.tasks.train
    if not isinstance(rows, TaskFile | TaskDataset) or not rows.labels:
        return
    counts = {"training": count_labels(splits.train), "evaluation": count_labels(splits.eval)}
    for column in {column: None for found in counts.values() for column in found}:
        texts = (
            f"{split}: {', '.join(f'{label} {n}' for label, n in of.most_common(MAX_LABELS))}"
            for split, found in counts.items()
            if (of := found.get(column))
        )
        yield Line(f"tasks by {column}", Result.OK, "; ".join(texts))


async def _baselines_differ(
    config: RunConfig, host: Host, adapter: Adapter, tasks: tuple[Task, Task]
) -> tuple[bool, bool]:
    """Play two tasks that begin alike with each baseline until one is answered differently.

    Returns whether any baseline could play, and whether the tasks differ. A baseline's own line
    says what is wrong with it.
    """
    is_played = False
    for dotted in config.env.baselines.values():
        try:
            async with asyncio.timeout(LIMIT_S), host.session() as session:
                play = partial(_play, adapter=adapter, policy=load_callable(dotted), env=config.env)
                one, other = [await play(session, task) for task in tasks]
        except (ConfigError, SessionError, TimeoutError):
            continue
        is_played = True
        if one.trajectory != other.trajectory:
            return True, True
    return is_played, False


def _tasks_lines(num_tasks: int, *, differ: bool, is_played: bool) -> Iterator[Line]:
    if num_tasks == 1:
        return
    if differ:
        yield Line("tasks", Result.OK, f"{num_tasks}; the first and the last differ")
    elif is_played:
        text = "the first and the last task are the same: does the environment read their keywords?"
        yield Line("tasks", Result.WARN, text)
    else:
        text = (
            f"{num_tasks}; the first and the last begin alike, and without a policy or a baseline "
            "that plays them it could not be told whether they differ"
        )
        yield Line("tasks", Result.OK, text)


def policy_path(config: RunConfig) -> str | None:
    """Return the scripted policy of the engine or of the warm start, if there is one."""
    if policy := config.engine.scripted_policy:
        return policy
    warm_start = config.trainer.warm_start
    return warm_start.source.scripted_policy if warm_start.steps else None
