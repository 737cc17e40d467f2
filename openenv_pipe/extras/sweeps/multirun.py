"""Expand a command line with several values into jobs.

From Hydra's multirun this uses the grammar: `a,b`, `range`, `glob`, `choice`, `interval`, `tag`. It
does not use Hydra's sweepers and launchers, which stop at the first failed job and cannot resume.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from openenv_pipe.config.compose import (
    NO_EXPERIMENT,
    block_of,
    load_values,
    parse_overrides,
    readable_errors,
)
from openenv_pipe.config.composed_files import open_loader
from openenv_pipe.config.secrets import shown_override
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps.schema import SweepConfig, SweepSettings

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAX_JOBS = 10_000  # of a grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    key: str
    kind: Literal["choice", "whole", "real"]
    values: tuple[Any, ...]  # all values of a choice, as text; else the lowest and the highest
    step: float | None = None  # of a range; None: continuous
    log: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MultirunRequest:
    sweep: SweepConfig
    parameters: tuple[Parameter, ...]  # of a search
    jobs: tuple[tuple[str, ...], ...]  # the overrides of each job; in a search, one shared entry


def read_request(overrides: Sequence[str]) -> MultirunRequest:
    with readable_errors(SweepSettings):
        parsed = parse_overrides(overrides, open_loader())
        if settings := [each for each in parsed if block_of(each) == "hydra"]:
            raise ConfigError(
                f"{shown_override(settings[0].input_line)}: Hydra's own settings have no effect; "
                "the jobs of a sweep run one after another, or, with sweep.ray.address=auto, in "
                "parallel on a Ray cluster, which may be this machine alone (`ray start --head`)"
            )
        own = [each for each in parsed if block_of(each) != "sweep"]
        sweep = _compose_sweep([each for each in parsed if block_of(each) == "sweep"])
        if sweep.type == "search":
            shared = tuple(each.input_line or "" for each in own if not each.is_sweep_override())
            parameters = tuple(_parameter(each) for each in own if each.is_sweep_override())
            if not parameters:
                raise ConfigError(
                    "sweep=search has nothing to search; give a key bounds or several values, "
                    "such as 'trainer.optimizer.lr=tag(log,interval(1e-4,1e-2))'"
                )
            return MultirunRequest(sweep=sweep, parameters=parameters, jobs=(shared,))
        values = [_values(each) for each in own]
        if (num_jobs := math.prod(map(len, values))) > MAX_JOBS:
            raise ConfigError(
                f"these values have at least {num_jobs:,} combinations; expected at most "
                f"{MAX_JOBS:,} jobs; give fewer, or add sweep=search"
            )
        jobs = tuple(itertools.product(*values))
        return MultirunRequest(sweep=sweep, parameters=(), jobs=jobs)


def _compose_sweep(overrides: Sequence["Override"]) -> SweepConfig:
    choice, lines = "+sweep=grid", []
    for override in overrides:
        line = (override.input_line or "").lstrip("+")
        if override.key_or_group == "sweep":
            choice = f"+{line}"
        else:
            lines.append(f"++{line}")
    values = load_values(open_loader(), [NO_EXPERIMENT, choice, *lines], only=("sweep",))
    return SweepSettings.model_validate(values).sweep


def _values(override: "Override") -> list[str]:
    """Expand the override into one for each of its values."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return [line]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{line!r} is an interval, whose values cannot be listed; add sweep=search, or give "
            "range(...) or a list of values"
        )
    values = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    if not values:
        raise ConfigError(f"{shown_override(line)} matches nothing")
    return [f"{override.get_key_element()}={value}" for value in values]


def _parameter(override: "Override") -> Parameter:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, sweep = override.get_key_element(), override.value()
    log = "log" in getattr(sweep, "tags", ())
    if isinstance(sweep, IntervalSweep | RangeSweep):
        ends: tuple[Any, ...]
        if isinstance(sweep, RangeSweep):
            ends, step = tuple(override.sweep_iterator()), abs(sweep.step)  # in any order
        else:
            ends, step = (sweep.start, sweep.end), None
        if not ends:
            raise ConfigError(f"{shown_override(override.input_line)} matches nothing")
        is_whole = all(isinstance(each, int) for each in ends)
        kind: Literal["whole", "real"] = "whole" if is_whole else "real"
        found = Parameter(key=key, kind=kind, values=(min(ends), max(ends)), step=step, log=log)
        if log:
            _reject_logarithm(found, override.input_line or "")
        return found
    values = tuple(line.removeprefix(f"{key}=") for line in _values(override))
    return Parameter(key=key, kind="choice", values=values)


def _reject_logarithm(parameter: Parameter, line: str) -> None:
    """Raise ConfigError for a logarithmic scale that cannot be searched."""
    low, high = parameter.values
    if low <= 0:
        raise ConfigError(f"{line!r}: {low} has no logarithm; expected bounds above 0")
    if parameter.step not in (None, 1) or (parameter.step and parameter.kind == "real"):
        raise ConfigError(
            f"{line!r}: a range has equal steps, a logarithmic scale does not; give "
            f"tag(log,interval({low},{high})), in int(...) for whole numbers, or remove log"
        )
