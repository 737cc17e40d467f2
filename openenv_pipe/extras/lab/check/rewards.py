"""Check the rewards of episodes, and whether they differ within groups."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.system.untrusted_text import shortened

ADVICE = (
    "GRPO has little to compare at the start; reward partial progress (reward.terms), or begin "
    "with a warm start (trainer.warm_start)"
)
MAX_FLAT = 0.75  # fraction of groups without spread from which on they are too many
USUAL_PENALTY = 0.1  # for an unusable reply, as in conf/reward/usable.yaml
MAX_SHOWN = 200  # characters of actions
MAX_FAILED = 0.5  # of a policy's episodes; those that are left say little of the rewards then
SAME = 1e-9  # Rewards are sums of floats; smaller differences do not count.

Groups = Mapping[str, Sequence[Sequence[PlayedEpisode]]]  # by policy; a group has one task


def reward_lines(groups: Groups, success_reward: float) -> Iterator[Line]:
    yield from _failure_lines(groups)
    scored = {name: _without_failures(each) for name, each in groups.items()}
    summaries = {name: _summary(each, success_reward) for name, each in scored.items() if each}
    for name, summary in summaries.items():
        yield Line(f"rewards, {name}", Result.OK, _text(summary), summary)
    if summaries:
        plays = [play for each in scored.values() for group in each for play in group]
        steps = [result for play in plays for result in play.results[1:]]
        if steps and all(step.reward is None for step in steps):
            text = "no step had a reward (it was always null); reward.terms has to define one"
            yield Line("learnable", Result.WARN, text)
        else:
            yield _learnable(summaries)
    elif not any(groups.values()):
        text = "episodes take too long to play groups of them within the time limit"
        yield Line("learnable", Result.WARN, text)


def silence_line(groups: Sequence[Sequence[PlayedEpisode]], silence: float) -> Line | None:
    """Compare acting at random with never acting, which earns `silence` per episode.

    Returns None if no episode of random actions was scored.
    """
    plays = [play for group in _without_failures(groups) for play in group]
    if not plays:
        return None
    mean = fmean(play.reward for play in plays)
    measured = {"random": mean, "never_acting": silence}
    text = f"random actions earn {mean:.3g} an episode, never acting {silence:.3g}"
    if mean >= silence:
        return Line("never acting", Result.OK, text, measured)
    weight = -unusable_penalty(plays)
    return Line(
        "never acting",
        Result.WARN,
        f"{text}: GRPO would learn to write unusable replies; set reward=usable and "
        f"reward.terms.unusable.weight={weight:g}",
        measured,
    )


def ends_line(plays: Sequence[PlayedEpisode], max_turns: int) -> Line | None:
    """Say how many episodes end by themselves. None if none was played that could."""
    played = [play for play in plays if play.actions and play.failure is None]
    if not played:
        return None
    num_done = sum(play.done for play in played)
    measured = {"episodes": len(played), "done": num_done}
    if num_done:
        text = f"{num_done} of {len(played)} episodes were done within {max_turns} turns"
        return Line("ends", Result.OK, text, measured)
    text = (
        f"no episode ends by itself: all {len(played)} ran to env.max_turns={max_turns}; raise it "
        "if episodes take longer, or let step() set done"
    )
    return Line("ends", Result.WARN, text, measured)


def best_play(groups: Groups, success_reward: float) -> PlayedEpisode | None:
    """Return an episode with the highest reward, to see whether its actions work in any task.

    None if all rewards are equal, or if random actions earned the highest and it is not a success:
    then more can be earned than was seen.
    """
    plays = {name: [play for group in each for play in group] for name, each in groups.items()}
    scored = [
        (play.reward, name == "scripted", play)
        for name, each in plays.items()
        for play in each
        if play.failure is None and play.actions
    ]
    if not scored:
        return None
    reward, is_scripted, best = max(scored, key=lambda each: each[:2])
    if reward - min(each[0] for each in scored) <= SAME:
        return None
    return best if is_scripted or reward >= success_reward else None


def constant_line(best: PlayedEpisode, repeated: Sequence[PlayedEpisode]) -> Line:
    """Say whether the actions of the best episode earn as much in every task.

    repeated: episodes of different tasks with these actions.
    """
    num_equal = sum(play.reward >= best.reward - SAME for play in repeated)
    measured = {"tasks": len(repeated), "equal": num_equal, "reward": best.reward}
    if num_equal < len(repeated) or len(repeated) < 2:
        text = (
            f"the actions of the best episode earn its {best.reward:.3g} in {num_equal} of "
            f"{len(repeated)} tasks"
        )
        return Line("constant actions", Result.OK, text, measured)
    distinct = list(dict.fromkeys(compact_json(action) for action in best.actions))
    what = "one action that does not look at the task earns everything"
    if len(distinct) > 1:
        what = f"{len(best.actions)} actions that do not look at the task earn everything"
    text = (
        f"{what}: the highest reward, {best.reward:.3g}, in each of {len(repeated)} tasks; a "
        f"model earns it without reading them: {shortened(', '.join(distinct), MAX_SHOWN)}"
    )
    return Line("constant actions", Result.WARN, text, measured)


def unusable_penalty(plays: Sequence[PlayedEpisode]) -> float:
    """Return a penalty for unusable replies that no step's exceeds, rounded up to two digits."""
    rewards = [result.reward or 0.0 for play in plays for result in play.results]
    lowest = max(USUAL_PENALTY, -min(rewards, default=0.0))
    digits = 1 - math.floor(math.log10(lowest))
    return math.ceil(lowest * 10**digits - 1e-9) / 10**digits


def _failure_lines(groups: Groups) -> Iterator[Line]:
    """Say how many episodes of each policy failed, as they would in training, and why."""
    for name, each in groups.items():
        plays = [play for group in each for play in group]
        failures = [play.failure for play in plays if play.failure is not None]
        if failures:
            text = f"{len(failures)} of {len(plays)} episodes failed, and count nowhere: "
            text += f"{failures[0]!s:.200}"
            if len(failures) < len(plays):
                text += (
                    "; env.step_exception=unusable takes an exception of a step as a mistake of "
                    "the policy"
                )
            is_bad = len(failures) > MAX_FAILED * len(plays)
            yield Line(f"episodes, {name}", Result.FAIL if is_bad else Result.WARN, text)


def _without_failures(groups: Sequence[Sequence[PlayedEpisode]]) -> list[list[PlayedEpisode]]:
    """Return the groups without failed episodes; groups with no other episodes are left out."""
    kept = [[play for play in group if play.failure is None] for group in groups]
    return [group for group in kept if group]


def _summary(groups: Sequence[Sequence[PlayedEpisode]], success_reward: float) -> dict[str, float]:
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
    flat = min(summary["flat_groups"] for summary in summaries.values())
    if flat < MAX_FLAT:
        return Line("learnable", Result.OK, "members of a group earn different rewards")
    if flat < 1.0:
        text = (
            f"in {flat:.0%} of the groups all members earn the same: {ADVICE}; with conf=NAME, "
            "--learn MINUTES says whether a model learns"
        )
        return Line("learnable", Result.WARN, text)
    if highest - lowest > SAME:
        text = f"rewards differ, but never within a group: {ADVICE}"
        return Line("learnable", Result.WARN, text)
    if "scripted" in summaries or highest > 0.0:
        text = f"every episode earns {highest:.3g}: there is nothing to learn"
        return Line("learnable", Result.FAIL, text)
    earned = "never earn anything" if highest == 0.0 else f"always earn {highest:.3g}"
    text = (
        f"random actions {earned}. A model that does the same (see eval start) has nothing to "
        "compare: reward partial progress (reward.terms), or begin with a warm start "
        "(trainer.warm_start); --policy tries a better policy"
    )
    return Line("learnable", Result.WARN, text)
