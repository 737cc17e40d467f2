"""Check the rewards of episodes, and whether they differ within groups."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev

from openenv_pipe.commands.env.episodes import PlayedEpisode
from openenv_pipe.commands.findings import Line, Result

ADVICE = (
    "GRPO has nothing to compare at the start; reward partial progress (reward.terms), or begin "
    "with a warm start (trainer.warm_start)"
)
SAME = 1e-9  # Rewards are sums of floats; smaller differences do not count.

Groups = Mapping[str, Sequence[Sequence[PlayedEpisode]]]


def reward_lines(groups: Groups, success_reward: float) -> Iterator[Line]:
    """Yield one line for each policy, and one with the conclusion."""
    summaries = {name: _summary(each, success_reward) for name, each in groups.items() if each}
    for name, summary in summaries.items():
        yield Line(f"rewards, {name}", Result.OK, _text(summary), summary)
    if summaries:
        yield _learnable(summaries)
    else:
        text = "episodes take too long to play groups of them within the time limit"
        yield Line("learnable", Result.WARN, text)


def _summary(groups: Sequence[Sequence[PlayedEpisode]], success_reward: float) -> dict[str, float]:
    """Summarise rewards and successes over episodes, and the spread within groups."""
    rewards = [[play.reward for play in group] for group in groups]
    every = [reward for group in rewards for reward in group]
    num_flat = sum(max(group) - min(group) <= SAME for group in rewards)
    return {
        "episodes": len(every),
        "lowest": min(every),
        "highest": max(every),
        "mean": fmean(every),
        "success": fmean(reward >= success_reward for reward in every),
        "std_in_group": fmean(map(pstdev, rewards)),
        "flat_groups": num_flat / len(rewards),
    }


def _text(summary: Mapping[str, float]) -> str:
    return (
        "{lowest:.3g} to {highest:.3g}, mean {mean:.3g} over {episodes:.0f} episodes; success "
        "{success:.0%}; {flat_groups:.0%} of groups without spread (std {std_in_group:.2g})"
    ).format(**summary)


def _learnable(summaries: Mapping[str, Mapping[str, float]]) -> Line:
    lowest = min(summary["lowest"] for summary in summaries.values())
    highest = max(summary["highest"] for summary in summaries.values())
    if any(summary["flat_groups"] < 1.0 for summary in summaries.values()):
        return Line("learnable", Result.OK, "members of a group earn different rewards")
    if highest - lowest > SAME:
        text = f"rewards differ, but never within a group: {ADVICE}"
        return Line("learnable", Result.WARN, text)
    if "scripted" in summaries or highest > 0.0:
        text = f"every episode earns {highest:.3g}: there is nothing to learn"
        return Line("learnable", Result.FAIL, text)
    text = f"random actions never earn anything: {ADVICE}; --policy tries a better policy"
    return Line("learnable", Result.WARN, text)
