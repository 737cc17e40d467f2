"""Find keys that somebody has set, but that have no effect because of other keys' values.

Whether keys contradict each other is checked in the schema. This is about keys that are valid and
do nothing, such as the estimator of a KL term whose coefficient is 0.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.config.beside import BESIDE_BLOCKS
from openenv_pipe.config.compose import Composed
from openenv_pipe.config.rules.engine import vllm_engine
from openenv_pipe.config.schema import (
    GroupRelativeAdvantageConfig,
    OptimizerConfig,
    ProcessHostConfig,
    RunConfig,
)
from openenv_pipe.config.yaml_files import EXPERIMENTS
from openenv_pipe.registry import extras, load
from openenv_pipe.system.resources import shipped_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class IneffectiveKeys:
    """Keys without an effect: these, and all keys below them."""

    keys: tuple[str, ...]
    because: tuple[str, ...]  # the keys whose values are the cause
    applies: Callable[[RunConfig], bool]
    advice: str


def _optimizer_rules(block: str, steps: str) -> Iterator[IneffectiveKeys]:
    """Return the rules of an optimizer. steps: the key with the number of its steps."""

    def optimizer(config: RunConfig) -> OptimizerConfig:
        trainer = config.trainer
        return trainer.warm_start.optimizer if "warm_start" in block else trainer.optimizer

    def num_steps(config: RunConfig) -> int:
        trainer = config.trainer
        if "warm_start" in block:
            return trainer.warm_start.steps
        return trainer.steps * trainer.total_updates_per_step

    yield IneffectiveKeys(
        keys=(f"{block}.final_lr_share",),
        because=(f"{block}.schedule",),
        applies=lambda c: (
            optimizer(c).schedule == "constant" and optimizer(c).final_lr_share not in (None, 1.0)
        ),
        advice="set schedule to linear or cosine",
    )
    yield IneffectiveKeys(
        keys=(f"{block}.schedule",),
        because=(f"{block}.final_lr_share",),
        applies=lambda c: (
            optimizer(c).schedule != "constant" and optimizer(c).final_lr_share == 1.0
        ),
        advice="set final_lr_share to null, or below 1",
    )
    yield IneffectiveKeys(
        keys=tuple(f"{block}.{key}" for key in ("lr", "schedule", "final_lr_share")),
        because=(f"{block}.lr_warmup_steps", steps),
        applies=lambda c: 0 < num_steps(c) <= optimizer(c).lr_warmup_steps,
        advice="training ends within the warm-up, before the learning rate is lr; set "
        "lr_warmup_steps below the number of optimizer steps",
    )


def _clip_is_idle(config: RunConfig) -> bool:
    """Return whether all ratios are 1: the old logprobs are those of the weights being updated."""
    trainer = config.trainer
    if trainer.total_updates_per_step > 1:
        return False
    if trainer.loss.correction.type != "none":
        return True  # the old logprobs are the trainer's own
    return config.engine.capabilities.is_exact and not trainer.max_staleness


def _evaluates_never(config: RunConfig) -> bool:
    """Return whether training ends before the first evaluation between two steps."""
    steps, every = config.trainer.steps, config.eval.during.every
    at_the_end = every == steps and config.trainer.checkpoint.best_by_evaluations
    return every > 0 and every >= steps > 0 and not at_the_end


def _keys(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names)


RULES = (
    *_optimizer_rules("trainer.optimizer", "trainer.steps"),
    *_optimizer_rules("trainer.warm_start.optimizer", "trainer.warm_start.steps"),
    IneffectiveKeys(
        keys=_keys("trainer.warm_start", "source", "episodes_per_step", "optimizer"),
        because=("trainer.warm_start.steps",),
        applies=lambda c: c.trainer.warm_start.steps == 0,
        advice="set trainer.warm_start.steps above 0",
    ),
    IneffectiveKeys(
        keys=_keys(
            "trainer.loss.kl",
            "reference",
            "hint",
            "estimator",
            "importance_weights",
            "refresh_every",
        ),
        because=("trainer.loss.kl.coef",),
        applies=lambda c: c.trainer.loss.kl.coef == 0,
        advice="set trainer.loss.kl.coef above 0",
    ),
    IneffectiveKeys(
        keys=("trainer.loss.kl.importance_weights",),
        because=("trainer.loss.kl.estimator",),
        applies=lambda c: c.trainer.loss.kl.estimator == "exact",
        advice="a mean over the whole vocabulary needs no weights of sampled tokens",
    ),
    IneffectiveKeys(
        keys=("trainer.loss.correction.high",),
        because=("trainer.loss.correction.type",),
        applies=lambda c: c.trainer.loss.correction.type == "none",
        advice="set trainer.loss.correction.type, to truncate for example",
    ),
    IneffectiveKeys(
        keys=("trainer.loss.correction.low",),
        because=("trainer.loss.correction.type",),
        applies=lambda c: "mask" not in c.trainer.loss.correction.type,
        advice="only trainer.loss.correction.type=mask and geometric_mask have a lower bound",
    ),
    IneffectiveKeys(
        keys=_keys("trainer.loss", "clip_low", "clip_high", "max_ratio"),
        because=("trainer.updates_per_step", "trainer.passes_per_step"),
        applies=_clip_is_idle,
        advice="the first update of a step has ratios of 1, which no clip changes; set "
        "one of them above 1 to have more",
    ),
    IneffectiveKeys(
        keys=("trainer.advantage.discount",),
        because=("reward.terms",),
        applies=lambda c: (
            isinstance(c.trainer.advantage, GroupRelativeAdvantageConfig)
            and not any(term.per_turn for term in c.reward.terms.values())
        ),
        advice="set per_turn=true for a term of the reward",
    ),
    IneffectiveKeys(
        keys=("trainer.parallel",),
        because=("trainer.devices",),
        applies=lambda c: c.trainer.devices == 1 and c.trainer.parallel == "fsdp",
        advice="set trainer.devices above 1",
    ),
    IneffectiveKeys(
        keys=_keys("eval.during", "num_tasks", "samples_per_task", "stop"),
        because=("eval.during.every",),
        applies=lambda c: c.eval.during.every == 0,
        advice="set eval.during.every to a number of steps",
    ),
    IneffectiveKeys(
        keys=_keys("eval.during.stop", "measure", "bound"),
        because=("eval.during.stop.at",),
        applies=lambda c: c.eval.during.stop.at is None,
        advice="set eval.during.stop.at",
    ),
    IneffectiveKeys(
        keys=("eval.during",),
        because=("eval.during.every", "trainer.steps"),
        applies=_evaluates_never,
        advice="training ends before the first evaluation; lower eval.during.every",
    ),
    IneffectiveKeys(
        keys=_keys("model.lora", "alpha", "dropout", "target_modules"),
        because=("model.lora.rank",),
        applies=lambda c: c.model.lora.rank == 0,
        advice="set model.lora.rank above 0",
    ),
    IneffectiveKeys(
        keys=("env.python",),
        because=("env.command",),
        applies=lambda c: (
            isinstance(c.host, ProcessHostConfig)
            and c.env.command is not None
            and c.env.python is not None
        ),
        advice="env.command says what is started",
    ),
    IneffectiveKeys(
        keys=_keys("host", "dockerfile", "build_args"),
        because=("host.image",),
        applies=lambda c: "image" in c.host.servers,
        advice="set host.image to null to build an image",
    ),
    IneffectiveKeys(
        keys=_keys("engine.sampling", "top_p", "top_k", "min_p"),
        because=("eval.temperature",),
        applies=lambda c: c.eval.temperature == 0,
        advice="evaluations are greedy; set eval.temperature above 0",
    ),
    IneffectiveKeys(
        keys=("engine.image",),
        because=("engine.launch",),
        applies=lambda c: bool((e := vllm_engine(c)) and e.launch in ("managed", "attach")),
        advice="set engine.launch=docker",
    ),
    IneffectiveKeys(
        keys=_keys("engine", "url", "api_key"),
        because=("engine.launch",),
        applies=lambda c: bool((e := vllm_engine(c)) and e.launch != "attach"),
        advice="set engine.launch=attach",
    ),
    IneffectiveKeys(
        keys=_keys(
            "engine",
            *("port", "gpu_memory_share", "cpu_cache_gb", "arguments", "variables"),
            *("start_timeout_s", "stop_timeout_s"),
        ),
        because=("engine.launch",),
        applies=lambda c: bool((e := vllm_engine(c)) and e.launch == "attach"),
        advice="the run starts no server; set it where the server is started",
    ),
    IneffectiveKeys(
        keys=("judge",),
        because=("reward.terms",),
        applies=lambda c: c.judge.answers and not c.reward.judged,
        advice="no term of the reward asks a judge; add one, such as reward=ruler",
    ),
)

# For environments in `beside`, whatever their experiments say.
WITH_THE_FIRST = IneffectiveKeys(
    keys=_keys("eval.during", "every", "stop"),
    because=(),
    applies=lambda c: True,
    advice="it is evaluated whenever the first environment is; set that key of eval instead",
)


def all_rules() -> list[IneffectiveKeys]:
    return [*RULES, *(rule for extra in extras() if extra.unused for rule in load(extra.unused))]


def unused_keys(composed: Composed) -> list[str]:
    """Return a sentence for each key of a composed configuration that has no effect, or not the
    whole effect that its name promises."""
    return [*find_unused(composed.config, composed.origins), *_kept_terms(composed)]


def _kept_terms(composed: Composed) -> list[str]:
    """Name the terms that an experiment's file sets, if an override chooses a reward: they stay,
    as everything that a file sets does."""
    chosen = next((each for each in composed.overrides if each.startswith("reward=")), None)
    kept = [
        (name, origin)
        for name in composed.config.reward.terms
        if isinstance(origin := composed.origins.get(f"reward.terms.{name}.type"), Path)
        and origin.parent.name == EXPERIMENTS
    ]
    if chosen is None or not kept:
        return []
    names, removals = (
        ", ".join(start + name for name, _ in kept) for start in ("", "~reward.terms.")
    )
    return [
        f"{chosen} is added to the terms that {kept[0][1]} sets: {names}; to remove these: "
        f"{removals}"
    ]


def idle_keys(config: RunConfig, keys: Collection[str]) -> set[str]:
    """Return those of the keys that have no effect with the values of the others."""
    rules = [rule for rule in all_rules() if rule.applies(config)]
    return {key for key in keys if any(_is_below(key, rule.keys) for rule in rules)}


def find_unused(config: RunConfig, origins: Mapping[str, Path | str]) -> list[str]:
    """Return a sentence for each key that somebody has set and that has no effect.

    A key of an experiment that an override has switched off on purpose does not count, and neither
    do the keys of shipped groups, which list all keys of their blocks.

    origins: by dotted key, the file or the override that sets it
    """
    found: dict[str, str] = {}
    rules, environments = all_rules(), _environments(config)
    for key, origin in origins.items():
        name, own = _in_environment(key, environments)
        each = environments[name]
        wrong = [WITH_THE_FIRST] if name and isinstance(origin, str) else []
        wrong += rules
        rule = next(
            (rule for rule in wrong if _is_below(own, rule.keys) and rule.applies(each)), None
        )
        if rule is None or not _is_chosen(origin):
            continue
        because = tuple(_in_run(cause, name) for cause in rule.because)
        causes = [other for other in origins if _is_below(other, because)]
        if isinstance(origin, Path) and any(isinstance(origins[each], str) for each in causes):
            continue
        values = [f"{each}={shown}" for each in because if (shown := _shown(config, each))]
        with_what = f" with {' and '.join(values)}" if values else ""
        found[key] = f"{key} has no effect{with_what}: {rule.advice}"
    return list(found.values())


def _environments(config: RunConfig) -> dict[str, RunConfig]:
    """Return the run of each environment alone, with the evaluation schedule of the first."""
    during = config.eval.during
    found = {"": config}
    for name, each in config.environments.items():
        if name:
            own = each.eval.during.model_copy(update={"every": during.every, "stop": during.stop})
            evaluation = each.eval.model_copy(update={"during": own})
            found[name] = each.model_copy(update={"eval": evaluation})
    return found


def _in_environment(key: str, names: Collection[str]) -> tuple[str, str]:
    """Return the environment in `beside` that a key belongs to, and the key in its own run."""
    block, _, rest = key.partition(".")
    name, _, own = rest.partition(".")
    if block != "beside" or name not in names:
        return "", key
    if own == "teacher":
        return name, "trainer.loss.kl.reference"
    return name, f"trainer.{own}" if _is_below(own, ("advantage",)) else own


def _in_run(key: str, name: str) -> str:
    """Return the run's key for a key of an environment's own run."""
    own = key.removeprefix("trainer.") if _is_below(key, ("trainer.advantage",)) else key
    is_shared = _is_below(key, ("eval.during.every", "eval.during.stop"))
    is_own = name and not is_shared and own.split(".")[0] in {*BESIDE_BLOCKS, "advantage"}
    return f"beside.{name}.{own}" if is_own else key


def _is_below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in names)


def _is_chosen(origin: Path | str) -> bool:
    """Return whether an override, an experiment or a group of the user's own sets a key."""
    if isinstance(origin, str):
        return True
    shipped = shipped_dir("conf")
    return not origin.is_relative_to(shipped) or origin.is_relative_to(shipped / EXPERIMENTS)


def _shown(config: RunConfig, key: str) -> str:
    """Return a value for the message; empty for a whole block."""
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if isinstance(value, dict | list) else "null" if value is None else str(value)
