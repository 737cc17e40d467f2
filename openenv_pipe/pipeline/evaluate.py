"""Evaluation: the same tasks with the same seeds for every model, and for scripted policies.

The pipeline calls this for its stages and between its steps, and the command `eval` calls it.
Episode k of a task has the same sampling seed for every policy, so that policies are comparable.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from openenv_pipe.config.schema import POLICY, UNTRAINED, RunConfig
from openenv_pipe.environments.client.session import step_aside
from openenv_pipe.environments.tasks import split_warnings
from openenv_pipe.errors import ConfigError, EngineError, FailureError, HostError, SessionError
from openenv_pipe.pipeline.components import build_roles, with_scripted_policy
from openenv_pipe.pipeline.opponents import find_opponent, opponent_label
from openenv_pipe.registry import if_command
from openenv_pipe.rollout import RolloutContext, collect_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.rollout.metrics import VOLATILE
from openenv_pipe.runs.eval_report import EvalReport, summarise, unplayed
from openenv_pipe.runs.evals import BASELINE, DURING, GREEDY, Evaluation, label_in
from openenv_pipe.system.progress import EpisodeCount

SEEDS_LABEL = "eval"  # sampling seeds are hashes of it; the same for all evaluations


class _Part(NamedTuple):
    """An evaluation of the model in one environment of the run."""

    env: str
    label: str
    num_tasks: int
    samples_per_task: int
    temperature: float


async def evaluate_model(
    config: RunConfig, rollout: RolloutContext, label: str, step: int | None, count: EpisodeCount
) -> list[Evaluation]:
    """Evaluate the model on `eval.num_tasks` tasks, sampled, and with `eval.greedy` also greedily.

    Each environment of the run has evaluations of its own, those of the first one first.

    step: the step of GRPO that produced the model; None: no run has trained it.
    count: gets the number of all episodes, and counts those that are finished.
    """
    parts = []
    for env, each in config.environments.items():
        num_tasks, samples_per_task = each.eval.num_tasks, each.eval.samples_per_task
        parts.append(_Part(env, label, num_tasks, samples_per_task, each.eval.temperature))
        if each.eval.greedy and config.engine.capabilities.samples:
            parts.append(_Part(env, label + GREEDY, num_tasks, 1, 0.0))
    return await _play_parts(config, rollout, parts, step, count)


async def evaluate_during(
    config: RunConfig, rollout: RolloutContext, step: int, count: EpisodeCount
) -> list[Evaluation]:
    """Evaluate the model between two training steps, as `eval.during` configures it."""
    parts = [
        _Part(
            env,
            f"{DURING}{step:06d}",
            each.eval.during.num_tasks or each.eval.num_tasks,
            each.eval.during.samples_per_task or each.eval.samples_per_task,
            each.eval.temperature,
        )
        for env, each in config.environments.items()
    ]
    return await _play_parts(config, rollout, parts, step, count)


async def _play_parts(
    config: RunConfig,
    rollout: RolloutContext,
    parts: Sequence[_Part],
    step: int | None,
    count: EpisodeCount,
) -> list[Evaluation]:
    count.total += sum(part.num_tasks * part.samples_per_task for part in parts)
    return [
        await _play(
            config.environments[part.env],
            rollout.environments[part.env],
            label_in(part.label, part.env),
            model=config.engine.player or config.model.label,
            step=step,
            num_tasks=part.num_tasks,
            samples_per_task=part.samples_per_task,
            temperature=part.temperature,
            count=count,
        )
        for part in parts
    ]


async def task_warnings(rollout: RolloutContext) -> list[str]:
    """Return warnings about the tasks of each environment.

    A task may begin differently with an equal seed, and eval tasks may repeat training tasks or
    lack some of their labels.

    Raises ConfigError, HostError: as any evaluation.
    """
    warnings: list[str] = []
    for each in rollout.environments.values():
        warnings += await asyncio.to_thread(split_warnings, each.env.tasks, each.splits)
        if (text := await _seed_warning(each)) is not None:
            warnings.append(text)
    return warnings


async def _seed_warning(rollout: RolloutContext) -> str | None:
    """Reset the first eval task twice with its seed; return a warning if it begins differently.

    The first messages are compared, without ids and times of day. Also returns None if a reset
    fails, which the evaluation shows, or if programs, clients or other machines play.
    """
    loop, env, task = rollout.loop, rollout.env, rollout.splits.eval[0]
    if rollout.agents is not None or not isinstance(loop, LocalRunner):
        return None
    begun = []
    try:
        for _ in range(2):
            async with loop.host.session() as session:
                result = await session.reset({**task.reset, "seed": task.seed}, env.reset_timeout_s)
                if result.done:
                    return None
                ask = partial(step_aside, session, env.step_timeout_s)
                opening = await loop.adapter.open(result.observation, ask)
                begun.append(VOLATILE.sub("", json.dumps(opening.messages, default=str)))
    except SessionError:
        return None
    first, again = begun
    if first == again:
        return None
    return (
        f"the task {task.id}, reset twice with seed {task.seed}, began differently the second "
        "time: evaluations of this environment do not play the same tasks, and a difference "
        "between two of them may come from their tasks; look for a reset keyword that names a "
        "task (env.tasks.eval.index_key)" + if_command("env", ", and see `openenv-pipe env check`")
    )


async def play_baselines(
    config: RunConfig, rollout: RolloutContext, count: EpisodeCount
) -> list[Evaluation]:
    """Evaluate the scripted policies of `env.baselines`, if `eval.baselines` is true.

    Returns an empty list if the engine needs no tokenizer, because scripted replies need one. Games
    against a checkpoint are left out, because the engine then serves the model's own games. A
    policy that cannot be played gets a report that says why, and the run goes on.

    count: gets the number of all episodes, and counts those that are finished.

    Raises EngineError, HostError: as any evaluation.
    """
    count.total += sum(
        len(each.env.baselines) * each.eval.num_tasks * each.eval.samples_per_task
        for _, each in _with_baselines(config)
    )
    return [
        await _play_baseline(
            each, rollout.environments[env], label_in(f"{BASELINE}{name}", env), policy, count
        )
        for env, each in _with_baselines(config)
        for name, policy in each.env.baselines.items()
    ]


def baseline_labels(config: RunConfig) -> list[str]:
    """Return the labels of the baselines that `play_baselines` plays."""
    return [
        label_in(f"{BASELINE}{name}", env)
        for env, each in _with_baselines(config)
        for name in each.env.baselines
    ]


def _with_baselines(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Return the environments whose baselines are played, with their names."""
    return [
        (env, each)
        for env, each in config.environments.items()
        if each.eval.baselines and config.engine.capabilities.needs_tokenizer
        if find_opponent(each) is None
    ]


async def _play_baseline(
    config: RunConfig, rollout: RolloutContext, label: str, policy: str, count: EpisodeCount
) -> Evaluation:
    try:
        return await _play(
            config,
            with_scripted_policy(rollout, policy),
            label,
            model=policy,
            step=None,
            num_tasks=config.eval.num_tasks,
            samples_per_task=config.eval.samples_per_task,
            temperature=None,
            count=count,
        )
    except (EngineError, HostError):
        raise
    except (ConfigError, FailureError) as error:
        why = (
            f"the baseline {label.removeprefix(BASELINE)!r} ({policy}) could not be played: "
            f"{error}; if it is its actions that raise on the server, set "
            "env.step_exception=unusable; eval.baselines=false leaves all baselines out"
        )
        return Evaluation(report=unplayed(label, policy, why), groups=[])


def stop_reason(config: RunConfig, report: EvalReport) -> str | None:
    """Return the reason if this evaluation ends training; None if training continues."""
    stop = config.eval.during.stop
    interval = report.success if stop.measure == "success" else report.reward
    if stop.at is None or interval is None or not report.is_representative:
        return None
    # Rewards that are equal in all tasks have no interval.
    has_low = stop.bound == "low" and interval.low is not None
    reached = interval.low if has_low else interval.mean
    if reached is None or reached < stop.at:
        return None
    return (
        f"stopped early: after step {report.step} the evaluation's {stop.measure} was "
        f"{interval:.3f} on {report.on_tasks}, and its {stop.bound} had to be at least "
        f"eval.during.stop.at={stop.at:g}"
    )


async def _play(
    config: RunConfig,
    rollout: RolloutContext,
    label: str,
    *,
    model: str,
    step: int | None,
    num_tasks: int,
    samples_per_task: int,
    temperature: float | None,
    count: EpisodeCount,
) -> Evaluation:
    """Play the first `num_tasks` tasks of the eval split, each `samples_per_task` times.

    In a game of several players, the trained ones take turns in the tasks.
    """
    began_s = time.monotonic()
    tasks = [rollout.splits.eval[index] for index in range(num_tasks)]
    evaluated = _as_players(config, rollout) or [(rollout, SEEDS_LABEL)]
    groups = [
        group
        for place, (context, seeds_label) in enumerate(evaluated[:num_tasks])
        for group in await collect_groups(
            context,
            tasks[place :: len(evaluated)],
            group_size=samples_per_task,
            temperature=temperature or 0.0,
            seed=config.seed,
            label=seeds_label,
            count=count,
        )
    ]
    report = summarise(
        label,
        [episode for group in groups for episode in group.episodes],
        config.eval,
        config.seed,
        reward=config.reward,
        model=model,
        step=step,
        temperature=temperature if config.engine.capabilities.samples else None,
        sampling=config.engine.distortions if temperature else None,
        opponent=opponent_label(config),
    )
    return Evaluation(report=report, groups=groups, duration_s=time.monotonic() - began_s)


def _as_players(config: RunConfig, rollout: RolloutContext) -> list[tuple[RolloutContext, str]]:
    """Return a context and a label for each trained player of a game, against all others."""
    players, opponent = config.env.players, config.eval.opponent
    if players is None:
        return []
    found = []
    for player in players.trained:
        others = {
            name: opponent or (UNTRAINED if role == POLICY else role)
            for name, role in players.roles.items()
        }
        roles = build_roles(config, {**others, player: POLICY}, rollout.engine)
        found.append((replace(rollout, roles=roles), f"{SEEDS_LABEL} {player}"))
    return found
