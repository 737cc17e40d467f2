"""The alarm about episodes and replies that a limit cut off, and what to raise."""

from collections.abc import Sequence

from openenv_pipe.reports.alarm import WINDOW, Alarm, Record, mean_of, reward_error, share_of

# Nats a token: a model that can write has about 1, and random weights of the tiny model 5.6.
RANDOM_ENTROPY = 4.0
NUM_ERRORS = 2.0  # standard errors that a rise is more than


def truncated(steps: Sequence[Record]) -> Alarm | None:
    """Return an alarm if limits cut off many of the last episodes, or a reply in them.

    There is none while the reward rises, and none for nearly random tokens, which end a reply only
    by chance, whatever the limit.
    """
    share = share_of(steps, "episodes/truncated", "episodes/count")
    entropy = mean_of(steps[-WINDOW:], "sampling/entropy")
    is_random = entropy is not None and entropy > RANDOM_ENTROPY
    if share is None or share < 0.25 or is_random or _is_rising(steps):
        return None
    return Alarm(
        metric="episodes/truncated",
        what=f"A limit of tokens or turns ended {share:.0%} of the last episodes, or cut a reply",
        advice=more_tokens(
            steps, share, "env.max_reply_tokens, env.max_episode_tokens or env.max_turns"
        ),
    )


def _is_rising(steps: Sequence[Record]) -> bool:
    """Return whether the last rewards are above those just before, beyond what chance explains.

    While there are fewer steps than two windows, the later half is compared with the earlier one.
    """
    known = [step for step in steps if step.get("reward/mean") is not None]
    size = min(WINDOW, len(known) // 2)
    if not size:
        return False
    last = known[-size:]
    after, before = mean_of(last, "reward/mean"), mean_of(known[-2 * size : -size], "reward/mean")
    assert after is not None and before is not None
    return after - before > NUM_ERRORS * reward_error(last)


def more_tokens(steps: Sequence[Record], share: float, keys: str) -> str:
    """Return advice to raise the limit that cuts off replies: a request's own, or the run's.

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
