"""What a run took, as its report says it: time, tokens, and money."""

from openenv_pipe.config.schema import JudgeConfig, RunConfig
from openenv_pipe.extras.report.sections import Records
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.paid_answers import paid_answers, price_of
from openenv_pipe.system.markdown import table
from openenv_pipe.system.progress import clock

TIMES = ("time/step_s", "time/rollout_s", "time/learner_s")
HOUR_S = 3600.0


def costs_text(folder: RunFolder, config: RunConfig, records: Records) -> str:
    """Return the section. Empty before the first step."""
    if not records:
        return ""
    times = _time_table(folder.duration_s, records)
    machine = _machine_costs(folder, config.price_per_hour)
    judge = _judge_costs(folder, config, records)
    return f"## What it took\n\n{times}\n\n{machine}{judge}."


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


def _machine_costs(folder: RunFolder, price_per_hour: float) -> str:
    machine, hours = folder.record.machine, folder.duration_s / HOUR_S
    gpus = len(machine.gpus)
    parts = f"{machine.num_cpus} CPUs and {gpus or 'no'} GPU{'s' * (gpus != 1)}"
    text = f"{hours:.2f} hours of a machine with {parts}"
    if price_per_hour:
        text += f", at {price_per_hour:g} an hour: **{hours * price_per_hour:.2f}**"
    return text


def _judge_costs(folder: RunFolder, config: RunConfig, records: Records) -> str:
    """Say what the answers of the run's judges cost. Empty if no answer was asked for or used.

    The metrics of steps have the price of each answer as often as it is used.
    """
    prices = [
        price_of(answer, *_token_prices(each.judge))
        for env, each in config.environments.items()
        for answer in paid_answers(folder.verdicts / "beside" / env if env else folder.verdicts)
    ]
    num_used = _sum("judge/calls", records)
    if not prices and not num_used:
        return ""
    if prices:
        tokens = sum(price.num_tokens for price in prices)
        cost = sum(price.cost for price in prices)
        text = f"{len(prices):,} answer{'s' * (len(prices) != 1)}: {tokens:,} tokens"
        text += f", at its prices: **{cost:.2f}**" if cost else ""
    else:
        text = "no answers: those that it needed were there already"
    used = f"; rewards of training used an answer {num_used:,.0f} times" if num_used else ""
    return f". The run and its evaluations asked the judge for {text}{used}"


def _token_prices(judge: JudgeConfig) -> tuple[float, float]:
    """Return the prices of a million tokens of prompts and of answers; 0 if it has none."""
    prompt, answer = (
        float(getattr(judge, f"price_per_million_{kind}_tokens", 0.0))
        for kind in ("prompt", "answer")
    )
    return prompt, answer


def _sum(key: str, records: Records) -> float:
    return sum(record.get(key) or 0.0 for record in records)
