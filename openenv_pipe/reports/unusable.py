"""Notice that a model learns not to act: the fraction of unusable replies rises while it trains.

Where rewards are negative and an unusable reply costs nothing, never acting is the best policy,
and a run that learns it looks like one that improves.
"""

from collections.abc import Iterable, Mapping
from typing import Any

METRIC = "replies/unusable"
MANY_UNUSABLE = 0.5  # fraction of replies from which on it is worth a warning
MARGIN = 0.1  # of a rise that is more than the noise of a step


def unusable_text(share: float, what: str) -> str:
    """Say how many replies are unusable, and the usual cause.

    what: the replies that are meant, such as `replies of the last steps`.
    """
    return (
        f"{share:.0%} of the {what} could not be turned into an action; most often the model does "
        "not know the form of a reply (describe it in env.adapter.system, or begin with a warm "
        "start), or the reply is cut before its end (env.max_reply_tokens)"
    )


class UnusableWatch:
    """Watches the fraction of unusable replies over the GRPO steps of a run."""

    def __init__(self, limit: float) -> None:
        """limit: `trainer.unusable_limit`."""
        self._limit = limit
        self._lowest: float | None = None
        self._has_warned = False

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """Return a warning if the fraction has risen above the limit with this step; once a run.

        A model that has never written usable replies is not warned of: its fraction has not risen.
        """
        share = record.get(METRIC)
        if record.get("stage") != "grpo" or share is None:
            return None
        lowest = share if self._lowest is None else min(self._lowest, share)
        self._lowest = lowest
        if self._has_warned or share <= self._limit or share - lowest < MARGIN:
            return None
        self._has_warned = True
        return (
            f"{share:.0%} of the replies of step {record['step']} are unusable, after {lowest:.0%} "
            "before: the model learns not to act, because an unusable reply costs less than an "
            "action; give the reward a term for it (reward=usable, and "
            "reward.terms.unusable.weight as low as the lowest reward of an action)"
        )


def unusable_warning(records: Iterable[Mapping[str, Any]], limit: float) -> str | None:
    """Return the warning of a run with these metrics; None if there is nothing to warn of."""
    watch = UnusableWatch(limit)
    warnings = [watch.warning(record) for record in records]
    return next((text for text in warnings if text is not None), None)
