"""The experiment that `env inspect` writes beside an environment's block: it trains as written.

What only one model needs is in a file of its own: limits in its tokens, measured in the
observations of a trial, and for the model `tiny`, whose tokens are bytes, settings that teach
random weights.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median_low
from typing import Any

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.machine import find_shape, memory_line
from openenv_pipe.config.compose import NO_EXPERIMENT, assign, block_of, compose, parse_overrides
from openenv_pipe.config.schema import (
    EnvConfig,
    LocalEngineConfig,
    RunConfig,
    ServingConfig,
    TaskRange,
)
from openenv_pipe.environments.adapters import Adapter
from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.chat_prompts import indented_json, written
from openenv_pipe.extras.lab.check.rewards import unusable_penalty
from openenv_pipe.extras.lab.trial import Trial
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.architecture_check import find_max_length
from openenv_pipe.models.hub import is_on_this_machine, provide_model
from openenv_pipe.models.load import build_empty, load_chat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rollout.conversation import cut_messages
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Message, Observation, Opening

TINY = "tiny"
RANDOM_POLICY = "openenv_pipe.environments.random_policy:random_action"
SHORT_EPISODE_TOKENS = 1024  # with the model `tiny`, a step takes seconds on a CPU
LONG_EPISODE_TOKENS = 4096  # for episodes that would have fewer than MIN_TURNS otherwise
LONGEST_EPISODE_TOKENS = 16_384  # for episodes that could not end otherwise
MAX_OBSERVATION_TOKENS = 768  # if longer ones would leave no room for MIN_TURNS
MIN_TURNS = 3
WARM_START_TOKENS = 800_000  # of the whole warm start, about; some hundred episodes teach JSON
TEXT_REPLY_TOKENS = 48  # of free text, whose length nothing shows
CHOICE_TOKENS = 32  # at least, for a model that may put words around a choice
FOLLOWING_TOKENS = 96  # at least: what an unusable reply is answered with
ROOM = 1.25  # factor over what was measured: other tasks may be longer
NUM_SERVERS = 4  # where a server has one session
START_LIMIT_S = 300.0  # several servers that start at once are slower than one
GROUPS = {"tasks_per_step": 4, "group_size": 8}
SMALL_GROUPS = {"tasks_per_step": 2, "group_size": 4}  # of long episodes, or slow ones
SLOW_STEP_S = 0.25  # from this duration of an environment's step on, few episodes are played


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model as `model=` names it, and how it counts and reads a conversation."""

    choice: str  # of the group `model`
    keys: Mapping[str, Any]  # of the block `model`, as overrides set them
    chat: ChatFormat
    max_length: int | None  # in tokens; None: it is fitted to the episodes, or is not known
    reads: bool  # prompts and examples mean something to it


def tiny_model() -> TrainedModel:
    return TrainedModel(
        choice=TINY, keys={}, chat=ChatFormat(build_tokenizer()), max_length=None, reads=False
    )


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the block `model`, and the others. Raises ConfigError."""
    of_model, others = list[str](), list[str]()
    for line, override in zip(overrides, parse_overrides(overrides), strict=True):
        (of_model if block_of(override) == "model" else others).append(line)
    return of_model, others


def find_model(overrides: Sequence[str], notify: Callable[[str], None]) -> TrainedModel:
    """Find the model of the overrides, and get its files if only this program can get them.

    Raises ConfigError: there is no such model, it has no chat template, or it cannot be trained.
    """
    if not overrides:
        return tiny_model()
    config = compose([NO_EXPERIMENT, "name=inspect", *overrides]).config.model
    choice, keys = TINY, dict[str, Any]()
    for override in parse_overrides(overrides):
        if override.key_or_group == "model":
            if not isinstance(named := override.value(), str):
                raise ConfigError(
                    f"model={named!r}: expected the name of a model's preset; give its keys one "
                    "by one, as in model=hub model.path=..."
                )
            choice = named
        else:
            assign(keys, override.key_or_group.removeprefix("model."), override.value())
    asyncio.run(provide_model(config, notify))
    reads = config.type != TINY
    is_measured = reads and is_on_this_machine(config)
    return TrainedModel(
        choice=choice,
        keys=keys,
        chat=load_chat(config),
        max_length=find_max_length(build_empty(config)) if is_measured else None,
        reads=reads,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_turns: int
    max_reply_tokens: int
    max_episode_tokens: int
    max_observation_tokens: int | None

    @property
    def keys(self) -> dict[str, int]:
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


async def fit_limits(env: EnvConfig, adapter: Adapter, trial: Trial, model: TrainedModel) -> Limits:
    """Measure the messages of a trial's episodes as the adapter and the model's template write
    them.

    If episodes were seen to end, the limits let some of them end, or half of them if each takes
    more than env.max_turns, as far as the tokens suffice. Raises ConfigError.
    """
    chat = model.chat
    openings = [await _opening(adapter, first, trial) for first in trial.firsts]
    seen = [each for play in trial.plays for each in play.observations[1:]]
    follows = [await awaited(adapter.follow(each)) for each in seen]
    reply = _reply_tokens(env, trial, model)
    wanted = env.max_turns
    if len(trial.endings) == len(trial.plays):
        longest = max(trial.endings)
        # An unusable reply takes a turn, too.
        wanted = min(wanted, 1 if longest == 1 else math.ceil(ROOM * longest))
    needed = min(wanted, MIN_TURNS)
    if trial.endings:
        needed = max(needed, min(trial.endings))
        if needed > env.max_turns:
            wanted, needed = max(trial.endings), median_low(trial.endings)

    def limits(max_tokens: int, limit: int | None) -> Limits:
        """Return the limits with as many turns as fit into `max_tokens`, or one."""
        first = max(_num_first(chat, opening, limit) for opening in openings)
        follow = max([_num_following(chat, each, limit) for each in follows], default=0)
        first, follow = math.ceil(ROOM * first), max(math.ceil(ROOM * follow), FOLLOWING_TOKENS)
        num_fitting = 1 + (max_tokens - first - reply) // (reply + follow)
        num_turns = max(1, min(wanted, num_fitting))
        return Limits(
            max_turns=num_turns,
            max_reply_tokens=reply,
            max_episode_tokens=first + reply + (num_turns - 1) * (reply + follow),
            max_observation_tokens=limit,
        )

    budgets = (
        (SHORT_EPISODE_TOKENS, None),
        (LONG_EPISODE_TOKENS, None),
        (LONG_EPISODE_TOKENS, MAX_OBSERVATION_TOKENS),
        (LONGEST_EPISODE_TOKENS, MAX_OBSERVATION_TOKENS),
    )
    # A token of a pretrained model is about four bytes, and its positions are there anyway.
    for budget, limit in budgets[1:] if model.reads else budgets:
        max_tokens = min(budget, model.max_length or budget)
        found = limits(max_tokens, limit)
        if found.max_turns >= needed and found.max_episode_tokens <= max_tokens:
            break
    return found


def ends_notes(trial: Trial, env: EnvConfig) -> Iterator[str]:
    """Say whether episodes can end within the limits of the written experiment, `env`."""
    num_ended = sum(num_turns <= env.max_turns for num_turns in trial.endings)
    if num_ended == len(trial.plays):
        return
    longest = max(play.num_turns for play in trial.plays)
    if not trial.endings:
        yield (
            f"no random episode was done within {longest} turns, so every episode of the "
            f"experiment runs to env.max_turns={env.max_turns}; raise it, and with model=tiny "
            "model.max_length, if the reward comes with the end"
        )
    else:
        yield (
            f"{num_ended} of {len(trial.plays)} random episodes were done within the env.max_turns="
            f"{env.max_turns} of the experiment, the others took up to {longest} turns; raise "
            "env.max_turns, env.max_episode_tokens and, with model=tiny, model.max_length to let "
            "more of them end"
        )


async def _opening(adapter: Adapter, first: Observation, trial: Trial) -> Opening:
    functions = [tool["function"] for tool in trial.tools]
    listing = [{**each, "input_schema": each["parameters"]} for each in functions]

    async def ask(action: Action) -> Observation:
        return {"tools": listing}

    return await adapter.open(first, ask)


def _num_first(chat: ChatFormat, opening: Opening, limit: int | None) -> int:
    return len(chat.first_ids(cut_messages(opening.messages, limit, chat.cut), opening.tools))


def _num_following(chat: ChatFormat, messages: Sequence[Message], limit: int | None) -> int:
    return len(chat.following_ids(cut_messages(messages, limit, chat.cut), end=None))


def _reply_tokens(env: EnvConfig, trial: Trial, model: TrainedModel) -> int:
    """Return the tokens of a reply: of the longest random action, or of some text.

    Models that understand language write JSON in several lines, and in a code block.
    """
    kind = env.adapter.type
    if env.adapter.type == "text" and "|" not in env.adapter.pattern:
        return TEXT_REPLY_TOKENS
    dump = indented_json if model.reads else compact_json
    actions = [action for play in trial.plays for action in play.actions]
    replies = [model.chat.writer.own_text(written(kind, action, dump)) for action in actions]
    lengths = [len(model.chat.reply_ids(reply)) for reply in replies]
    fitted = math.ceil(ROOM * max(lengths, default=TEXT_REPLY_TOKENS))
    return max(fitted, CHOICE_TOKENS) if model.reads else fitted


def experiment(name: str, serving: ServingConfig, trial: Trial, limits: Limits) -> dict[str, Any]:
    """Return the keys of the experiment for any model, except for its defaults list.

    name: of the experiment and its block.
    """
    is_slow = trial.mean_step_s > SLOW_STEP_S
    is_small = is_slow or limits.max_episode_tokens > SHORT_EPISODE_TOKENS
    num_tasks = 4 if is_slow else 20 if is_small else 50
    if isinstance(held_out := serving.env.tasks.eval, TaskRange):
        num_tasks = min(num_tasks, held_out.num_tasks)
    return {
        "name": name,
        "host": _host(serving, trial),
        "reward": {"terms": {"unusable": {"weight": -unusable_penalty(trial.plays)}}},
        "trainer": {"steps": 40, **(SMALL_GROUPS if is_small else GROUPS)},
        "eval": {"num_tasks": num_tasks, "temperature": 1.0},
    }


def for_model(
    serving: ServingConfig, trial: Trial, limits: Limits, model: TrainedModel
) -> dict[str, Any]:
    """Return the keys of the experiment that only this model needs. The learning rates of a
    pretrained one are not among them, because they follow from its kind."""
    if model.reads:
        return {"env": limits.keys, **({"model": dict(model.keys)} if model.keys else {})}
    return {
        "env": limits.keys,
        "model": {"max_length": limits.max_episode_tokens, **model.keys},
        "trainer": _for_random_weights(serving, trial, limits),
    }


def fit_memory(config: RunConfig) -> dict[str, Any]:
    """Return the keys that make batches small enough for the free memory of this machine.

    Empty if the defaults are, or the model's shape is not known. The trainer's batch is halved down
    to one episode, then that of the engine.

    Raises ConfigError if the model cannot be read.
    """
    shape, engine, trainer = find_shape(config.model), config.engine, config.trainer
    if shape is None or not isinstance(engine, LocalEngineConfig):
        return {}
    keys: dict[str, dict[str, int]] = {}
    tokens, longest = trainer.tokens_per_batch, config.env.max_episode_tokens
    num_sampled = trainer.episodes_per_step
    while memory_line(config, shape).result is not Result.OK:
        if tokens > longest:
            tokens = max(longest, tokens // 2)
            keys["trainer"] = {"tokens_per_batch": tokens}
        elif num_sampled > 1:
            num_sampled //= 2
            keys["engine"] = {"max_batch": num_sampled}
        else:
            break
        fitted = {name: getattr(config, name).model_copy(update=keys[name]) for name in keys}
        config = config.model_copy(update=fitted)
    return keys


def _for_random_weights(serving: ServingConfig, trial: Trial, limits: Limits) -> dict[str, Any]:
    trainer: dict[str, Any] = {}
    if serving.env.adapter.type in ("json", "tool") and trial.num_actions:
        is_slow = trial.mean_step_s > SLOW_STEP_S
        # A model with random weights never writes JSON by chance: it is shown random actions.
        trainer["warm_start"] = {
            "steps": max(5, min(100, WARM_START_TOKENS // (4 * limits.max_episode_tokens))),
            "source": {"policy": RANDOM_POLICY, "num_episodes": 8 if is_slow else 64},
            "episodes_per_step": 4,
            "optimizer": {"type": "muon", "lr": 4.0e-3, "schedule": "linear"},
        }
    # Muon follows the noise of few episodes: at 1e-3, 16 a step undid a warm start in six steps.
    lr = 3.0e-4 if "warm_start" in trainer else 1.0e-2
    trainer["optimizer"] = {"type": "muon", "lr": lr}
    return trainer


def _host(serving: ServingConfig, trial: Trial) -> dict[str, Any]:
    host = serving.host
    keys: dict[str, Any] = {"sessions_per_server": trial.num_sessions, **host.servers}
    if host.starts_servers and trial.num_sessions == 1:
        keys = {"num_servers": NUM_SERVERS, **keys, "start_timeout_s": START_LIMIT_S}
    return keys
