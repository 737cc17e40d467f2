"""Notice that a model learns not to act, or that it cannot act.

Where rewards are negative and an unusable reply costs nothing, never acting is the best policy,
and a run that learns it looks like one that improves. Where every action raises on the server, and
env.step_exception=unusable takes that as the model's mistake, a broken environment looks like a bad
model.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openenv_pipe.environments.client.protocol import EXECUTION_ERROR
from openenv_pipe.registry import if_command
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Group

METRIC = "replies/unusable"
MANY_UNUSABLE = 0.5  # fraction of replies from which on there is a warning
MAX_SHOWN = 300  # characters of an exception
MARGIN = 0.1  # of a rise that is more than the noise of a step


def unusable_text(share: float, what: str) -> str:
    """Say how many replies are unusable, and the usual cause.

    what: the replies that are meant, such as `replies of the last steps`.
    """
    return (
        f"{share:.0%} of the {what} could not be turned into an action; most often the model does "
        "not know the form of a reply (describe it in env.adapter.system, or begin with a warm "
        "start, or a longer one: trainer.warm_start.steps), or the reply is cut before its end "
        "(env.max_reply_tokens)"
    )


class UnusableWatch:
    """Watches the unusable replies over the GRPO steps of a run."""

    def __init__(self, limit: float) -> None:
        """limit: `trainer.unusable_limit`."""
        self._limit = limit
        self._lowest: float | None = None
        self._has_warned = False
        self._has_warned_of_exceptions = False

    def exceptions(self, record: Mapping[str, Any], groups: Sequence[Group]) -> str | None:
        """Return a warning if every action of a step that reached the server raised; once per run.

        groups: the step's.
        """
        turns = [turn for group in groups for each in group.episodes for turn in each.turns]
        whys = [
            turn.unusable for turn in turns if (turn.unusable or "").startswith(EXECUTION_ERROR)
        ]
        if self._has_warned_of_exceptions or not whys or any(turn.steps for turn in turns):
            return None
        self._has_warned_of_exceptions = True
        return (
            f"all {len(whys)} actions of step {record['step']} that reached the environment raised "
            f"there, the first with {shortened(str(whys[0]), MAX_SHOWN)}; nothing can be learned "
            "while none is accepted"
            + if_command("env", ": `openenv-pipe env check` says whether any is")
        )

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """Return a warning if the fraction has risen above the limit with this step; once per run.

        A model that has never written usable replies gets none: its fraction has not risen.
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
    return next(filter(None, map(UnusableWatch(limit).warning, records)), None)
