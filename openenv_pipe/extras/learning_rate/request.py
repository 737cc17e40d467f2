"""Which learning rates are tried, the configuration of each trial, and the trials as a table."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.overrides import override_with_text
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.learning_rate.choice import MIN_STEPS, Choice, Mean, Trial
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.tables import Column, Fit, Table
from openenv_pipe.system.untrusted_text import for_people

KEY = "trainer.optimizer.lr"
FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # of the configuration's rate
# A collapse has to show, a trial needs no best checkpoint, and the checkpoint after the warm start,
# from which the other trials begin, has to be kept.
OWN = ("trainer.guard=warn", "trainer.checkpoint.best=null", "trainer.checkpoint.keep_last=null")
NOTHING = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    config: RunConfig  # of all trials, but for the rate
    trials: Mapping[float, Composed]  # by ascending rate
    num_steps: int  # of GRPO, at each rate

    @property
    def costs(self) -> str:
        """Return what is going to be done, in a sentence."""
        trainer = self.config.trainer
        text = (
            f"{len(self.trials)} learning rates x {self.num_steps} steps of "
            f"{trainer.tasks_per_step} x {trainer.group_size} episodes, without evaluations: "
            f"{', '.join(f'{rate:g}' for rate in self.trials)}"
        )
        if trainer.warm_start.steps:
            text += f"; all start from one warm start of {trainer.warm_start.steps} steps"
        return text

    @property
    def doubts(self) -> Sequence[str]:
        """Return why so few steps may not show what a rate does."""
        trainer, found = self.config.trainer, list[str]()
        num_warmup = _num_warmup_steps(self.config)
        if num_warmup >= self.num_steps:
            found.append(
                f"in all {self.num_steps} steps the learning rate still rises to its value "
                f"(trainer.optimizer.lr_warmup_steps={trainer.optimizer.lr_warmup_steps}), so "
                f"lower rates are compared; --steps {num_warmup + MIN_STEPS} goes on from there"
            )
        if self.num_steps < MIN_STEPS:
            found.append(
                f"a collapse is seen from {MIN_STEPS} steps on, but only {self.num_steps} are "
                f"taken; --steps {MIN_STEPS} takes as many"
            )
        return found


def read_request(overrides: Sequence[str], rates: str | None, num_steps: int | None) -> Request:
    """Return the search that the options ask for.

    rates: numbers with commas between them; None: around the configuration's. num_steps: None: ten
    after the learning rate's warm-up, but at most `trainer.steps`.

    Raises ConfigError.
    """
    own = compose(overrides).config
    shared = [*overrides, *OWN, override_with_text("name", f"{own.name}_lr")]
    config = compose(shared).config
    trainer = config.trainer
    if trainer.steps < 2:
        raise ConfigError(
            f"trainer.steps={trainer.steps}: the search for GRPO's learning rate takes at least 2 "
            "steps; set trainer.steps to that of the training run. The rate of a supervised stage "
            "is not searched for"
        )
    if not config.agent.plays_on_demand:
        raise ConfigError(
            f"agent={config.agent.type}: at each learning rate the same tasks are played again, "
            "which clients do not do; use an agent whose episodes this program starts, such as "
            "agent=loop"
        )
    if num_steps is None:
        num_steps = min(_num_warmup_steps(config) + MIN_STEPS, trainer.steps)
    elif num_steps > trainer.steps:
        raise ConfigError(
            f"--steps {num_steps} is more than trainer.steps={trainer.steps}; raise trainer.steps, "
            "or give fewer"
        )
    if rates is None:
        tried = [float(f"{factor * trainer.optimizer.lr:.2g}") for factor in FACTORS]
    else:
        tried = _read_rates(rates)
    trials = {lr: compose([*shared, f"{KEY}={lr!r}"]) for lr in tried}
    return Request(config=config, trials=trials, num_steps=num_steps)


def _read_rates(text: str) -> list[float]:
    try:
        found = sorted(float(word) for word in text.split(","))
    except ValueError:
        found = []
    if len(found) < 2 or len({*found}) < len(found) or not all(0 < r < math.inf for r in found):
        raise ConfigError(
            f"--rates {text!r}: expected at least two different numbers above 0 with commas "
            "between them, such as --rates 1e-6,1e-5"
        )
    return found


def _num_warmup_steps(config: RunConfig) -> int:
    trainer = config.trainer
    return math.ceil(trainer.optimizer.lr_warmup_steps / trainer.total_updates_per_step)


def as_table(trials: Sequence[Trial]) -> Table:
    optional: list[tuple[str, Callable[[Trial], float | None], str]] = [
        ("success", lambda trial: trial.success, "{:.2f}"),
        ("KL", lambda trial: trial.kl, "{:.3g}"),
    ]
    shown = [each for each in optional if any(map(each[1], trials))]
    table = Table(
        Column("lr", justify="right"),
        Column("reward, first third", justify="right"),
        Column("last third", justify="right"),
        *(Column(title, drop=2, justify="right") for title, _, _ in shown),
        Column("gradient norm", drop=3, justify="right"),
        Column("unusable replies", drop=2, justify="right"),
        Column("run", drop=4),
        Column("alarms", fit=Fit.FOLD),
    )
    for trial in trials:
        alarms = [*trial.collapses, *([trial.failure] if trial.failure else [])]
        table.add_row(
            f"{trial.lr:g}",
            _mean(trial.first),
            _mean(trial.last),
            *(_number(value(trial), form) for _, value, form in shown),
            _number(trial.grad_norm, "{:.3g}"),
            _number(trial.unusable, "{:.0%}"),
            trial.run,
            for_people("; ".join(alarms)) or "none",
        )
    return table


def override_of(choice: Choice) -> str | None:
    return None if choice.lr is None else f"{KEY}={choice.lr!r}"


def as_json(trials: Sequence[Trial], choice: Choice) -> str:
    rows = [asdict(trial) for trial in trials]
    found = {"trials": rows, **asdict(choice), "override": override_of(choice)}
    return redact(json.dumps(found, indent=2))


def _mean(mean: Mean | None) -> str:
    return NOTHING if mean is None else f"{mean.value:.3f} ± {mean.error:.3f}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
