"""The trials of a search as a table, and the search as JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from openenv_pipe.extras.learning_rate.choice import Choice, Mean, Trial
from openenv_pipe.extras.learning_rate.request import KEY
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.tables import Column, Fit, Table
from openenv_pipe.system.untrusted_text import for_people

NOTHING = "–"


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
