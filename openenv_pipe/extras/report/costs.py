"""What a run took, as its report says it: time, tokens, and money."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.markdown import table
from openenv_pipe.system.progress import clock

TIMES = ("time/step_s", "time/rollout_s", "time/learner_s")
HOUR_S = 3600.0

Records = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def costs_text(folder: RunFolder, config: RunConfig, records: Records) -> str:
    """Return the section. Empty before the first step."""
    if not records:
        return ""
    times = _time_table(folder.duration_s, records)
    return f"## What it took\n\n{times}\n\n{_costs(folder, config.price_per_hour, records)}"


def seconds_text(seconds: float) -> str:
    """Format a duration; 0 becomes an empty text."""
    if seconds < 60.0:
        return f"{seconds:.1f} s" if seconds else ""
    return clock(seconds)


def _time_table(duration_s: float, records: Records) -> str:
    """Sum the time/ keys; the rest of the run is start-up, evaluation and checkpoints."""
    rows, in_steps_s = [], 0.0
    for stage in dict.fromkeys(record["stage"] for record in records):
        steps = [record for record in records if record["stage"] == stage]
        sums = [_sum(key, steps) for key in TIMES]
        in_steps_s += sums[0]
        tokens = [f"{_sum(f'tokens/{kind}', steps):,.0f}" for kind in ("sampled", "trained")]
        rows.append([stage, str(len(steps)), *map(seconds_text, sums), *tokens])
    rest_s = max(duration_s - in_steps_s, 0.0)
    rows.append(["everything else", "", seconds_text(rest_s), "", "", "", ""])
    times = ("time", "of which rollout", "of which learner")
    return table(["stage", "steps", *times, "tokens sampled", "tokens trained"], rows)


def _costs(folder: RunFolder, price_per_hour: float, records: Records) -> str:
    """Say what the machine and the judge cost, as far as their prices are known.

    Of the judge's answers, metrics count only those that rewards of training use.
    """
    machine, hours = folder.record.machine, folder.duration_s / HOUR_S
    gpus = len(machine.gpus)
    parts = f"{machine.num_cpus} CPUs and {gpus or 'no'} GPU{'s' * (gpus != 1)}"
    text = f"{hours:.2f} hours of a machine with {parts}"
    if price_per_hour:
        text += f", at {price_per_hour:g} an hour: **{hours * price_per_hour:.2f}**"
    calls, tokens, judge = (_sum(f"judge/{key}", records) for key in ("calls", "tokens", "cost"))
    if calls:
        text += f". The judge's {calls:,.0f} answers for rewards of training took"
        text += f" {tokens:,.0f} tokens" + (f", at its prices: **{judge:.2f}**" if judge else "")
        text += "; those of evaluations and answers without a verdict are not counted"
    return f"{text}."


def _sum(key: str, records: Records) -> float:
    return sum(record.get(key) or 0.0 for record in records)
