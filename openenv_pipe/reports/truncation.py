"""The alarm about episodes and replies that a limit cut off, and what to raise."""

from collections.abc import Sequence

from openenv_pipe.reports.alarm import Alarm, Record, share_of


def truncated(steps: Sequence[Record]) -> Alarm | None:
    """Return an alarm if limits cut off many of the last episodes, or a reply in them."""
    share = share_of(steps, "episodes/truncated", "episodes/count")
    if share is None or share < 0.25:
        return None
    return Alarm(
        metric="episodes/truncated",
        what=f"A limit of tokens or turns ended {share:.0%} of the last episodes, or cut a reply",
        advice=more_tokens(
            steps, share, "env.max_reply_tokens, env.max_episode_tokens or env.max_turns"
        ),
    )


def more_tokens(steps: Sequence[Record], share: float, keys: str) -> str:
    """Advise to raise the limit that cuts replies off: a request's own one, or those of the run.

    share: of the last episodes, those that any limit cut off.
    keys: those of the run's limits.
    """
    by_request = share_of(steps, "episodes/cut_by_request", "episodes/count") or 0.0
    advice = f"raise {keys}, or add reward=overlong, which makes long replies cost something"
    if not by_request:
        return advice
    asked = (
        "raise max_tokens in the requests of your program or client, which cut off "
        f"{by_request:.0%} of the episodes"
    )
    return asked if by_request > share / 2 else f"{advice}; also {asked}"
