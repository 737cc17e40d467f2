"""Say that episodes have no reward: a judge, a verifier or a reward term gave no value for them.

Such an episode counts in no mean and teaches nothing, so a run that has only such episodes looks
like one that has not learned yet.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openenv_pipe.errors import FailureError
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Episode, Group

METRIC = "judge/failed"
CAUSE = "a judge, a verifier or a reward term gave no value"
MAX_REASON_LENGTH = 300  # characters
MAX_STEPS = 3  # in a row without a single reward, after which the run ends

Record = Mapping[str, Any]


class UnscoredWatch:
    """Watches whether the episodes of GRPO steps have rewards."""

    def __init__(self, num_steps: int) -> None:
        """num_steps: of the run; if it has fewer than MAX_STEPS, they are the limit."""
        self._max_steps = max(1, min(MAX_STEPS, num_steps))
        self._num_unscored = 0  # steps in a row without a single reward
        self._has_warned = False

    def warning(self, record: Record, groups: Sequence[Group] = ()) -> str | None:
        """Note a step; return a warning, once per run, if none of its episodes has a reward.

        groups: the step's, for the reason.
        """
        if record.get("stage") != "grpo":
            return None
        num_unscored, num_played = _counts(record)
        is_unscored = bool(num_unscored) and num_unscored >= num_played
        self._num_unscored = self._num_unscored + 1 if is_unscored else 0
        if self._has_warned or not is_unscored:
            return None
        self._has_warned = True
        return (
            f"no episode of step {record['step']} has a reward, so nothing was learned from it: "
            f"{reason(_episodes(groups)) or CAUSE}"
        )

    def check(self, groups: Sequence[Group]) -> None:
        """Raise FailureError if too many steps in a row had no reward at all.

        groups: those of the last step, for the reason.
        """
        if self._num_unscored >= self._max_steps:
            raise FailureError(
                f"no episode of the last {self._num_unscored} steps has a reward, so nothing is "
                f"learned: {reason(_episodes(groups)) or CAUSE}; correct that part of the reward"
            )


def unscored_text(records: Iterable[Record], reports: Mapping[str, EvalReport]) -> str:
    """Say how many episodes of a run have no reward; empty if all have one.

    reports: of the evaluations, by name.
    """
    counts = [_counts(record) for record in records]
    num_unscored = sum(unscored for unscored, _ in counts)
    parts = []
    if num_unscored:
        parts.append(f"{num_unscored} of {sum(played for _, played in counts)} in training")
    parts += [
        f"{report.num_unscored} of {sum(report.statuses.values()) - report.num_failed} in the "
        f"evaluation `{name}`"
        for name, report in reports.items()
        if report.num_unscored
    ]
    if not parts:
        return ""
    return (
        f"**Episodes without a reward:** {', '.join(parts)}, because {CAUSE}. They count in no "
        "mean, and nothing is learned from them."
    )


def reason(episodes: Iterable[Episode]) -> str:
    """Return why one of the episodes has no reward; empty if all have one."""
    reasons = (episode.unscored for episode in episodes)
    return shortened(next((each for each in reasons if each), ""), MAX_REASON_LENGTH)


def _episodes(groups: Iterable[Group]) -> Iterable[Episode]:
    return (episode for group in groups for episode in group.episodes)


def _counts(record: Record) -> tuple[int, int]:
    """Return how many episodes of a GRPO step have no reward, and how many did not fail."""
    if record.get("stage") != "grpo":
        return 0, 0
    num_played = (record.get("episodes/count") or 0) - (record.get("episodes/failed") or 0)
    return record.get(METRIC) or 0, num_played
