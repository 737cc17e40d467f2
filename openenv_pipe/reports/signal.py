"""What the learning signal of a run cost, in groups, episodes and tokens (OpenEnv, RFC 013)."""

from collections.abc import Mapping, Sequence
from typing import Any

LAST_SHARE = 0.1  # of the steps, which are shown beside the whole run

Records = Sequence[Mapping[str, Any]]


def signal_text(records: Records) -> str:
    """Say how many groups had a signal and what each cost; empty before the first step of GRPO."""
    steps = [record for record in records if record.get("stage") == "grpo"]
    if not steps:
        return ""
    text = f"**Learning signal:** {_costs(steps)}"
    num_last = round(LAST_SHARE * len(steps))
    if num_last > 1:
        text += f"; in the last {num_last} steps, {_costs(steps[-num_last:])}"
    return f"{text}."


def _costs(steps: Records) -> str:
    num_signals = _sum(steps, "groups/trained")
    num_groups = num_signals + _sum(steps, "groups/skipped")
    text = f"{num_signals:,} of {num_groups:,} groups had one"
    if not num_signals:
        return text
    num_episodes, num_tokens = _sum(steps, "episodes/count"), _sum(steps, "tokens/sampled")
    return (
        f"{text}, each for {num_episodes / num_signals:.1f} episodes and "
        f"{num_tokens / num_signals:,.0f} sampled tokens"
    )


def _sum(steps: Records, key: str) -> int:
    return sum(step.get(key) or 0 for step in steps)
