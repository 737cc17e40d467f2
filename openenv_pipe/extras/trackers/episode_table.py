"""Tables of episodes for trackers: the worst and the best of a step, with what they said."""

from collections.abc import Sequence
from itertools import chain

from openenv_pipe.extras.trackers.schema import EpisodeTableConfig
from openenv_pipe.runs.transcript import transcript
from openenv_pipe.system.untrusted_text import for_people
from openenv_pipe.trackers.base import TrackedStep
from openenv_pipe.types import Episode

COLUMNS = ("step", "task", "member", "status", "success", "reward", "terms", "turns", "transcript")
Row = tuple[int, str, int, str, bool, float | None, str, int, str]


def episode_rows(config: EpisodeTableConfig, step: TrackedStep) -> list[Row]:
    """Return the table of a step, one row an episode; empty if none is due.

    All texts of environments and models in it are escaped and shortened.
    """
    number = step.record["step"]
    if not step.groups or number % config.episodes_every:
        return []
    episodes = [*chain.from_iterable(group.episodes for group in step.groups)]
    return [_row(number, each) for each in _extremes(episodes, config.episodes_per_table)]


def _extremes(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return the episodes of the lowest and of the highest rewards, `count` at most.

    Those without a reward come last, where there is room for them.
    """
    ranked = sorted((each for each in episodes if each.is_scored), key=lambda each: each.reward)
    if len(ranked) <= count:
        return [*ranked, *(each for each in episodes if not each.is_scored)][:count]
    num_worst = (count + 1) // 2
    return ranked[:num_worst] + ranked[len(ranked) - (count - num_worst) :]


def _row(step: int, episode: Episode) -> Row:
    terms = ", ".join(f"{name} {value:g}" for name, value in episode.reward_terms.items())
    return (
        step,
        for_people(episode.task.id),
        episode.member,
        str(episode.status),
        episode.success,
        float(episode.reward) if episode.is_scored else None,
        for_people(terms),
        len(episode.turns),
        transcript(episode),
    )
