"""Say which episodes clients did not play to their end, and which groups were dropped for it."""

from collections.abc import Mapping, Sequence
from typing import Any

REASONS = {
    "clients/failed": "failed at their clients",
    "clients/lost": "were lost with their clients",
    "clients/late": "were not done when the time of their group was over",
}


def clients_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence for the report; empty if clients played all episodes to the end."""
    steps = [record for record in records if record.get("clients/lost") is not None]
    if not steps:
        return ""
    counts = {text: sum(step[name] for step in steps) for name, text in REASONS.items()}
    parts = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    num_played = sum(record.get("episodes/count") or 0 for record in records)
    num_dropped = sum(step["groups/dropped"] for step in steps)
    return (
        f"**Episodes of clients:** of {num_played}, {parts}. Groups that were left with fewer than "
        f"two episodes taught nothing: {num_dropped}."
    )
