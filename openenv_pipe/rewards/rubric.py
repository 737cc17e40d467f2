"""The term `rubric`: numbers that the environment reports in its observations."""

from openenv_pipe.config.schema import RubricTerm
from openenv_pipe.rewards.reported_numbers import MAX_SCORES, last_number, last_rubric_scores
from openenv_pipe.rewards.values import (
    NoValue,
    TermSources,
    TermValue,
    Values,
    check_number,
    weighted,
)
from openenv_pipe.types import Episode, Group


class ReportedTerm:
    """A `rewards.values.GroupTerm` whose numbers the environment reports."""

    def __init__(self, name: str, term: RubricTerm, sources: TermSources) -> None:
        self._name = name
        self._term = term

    async def values(self, group: Group) -> Values:
        return {episode.member: self._value(episode) for episode in group.scored}

    def _value(self, episode: Episode) -> TermValue | NoValue:
        term, observations = self._term, episode.observations
        reported = last_rubric_scores(observations)
        named = [*(term.weights or {}), *term.gates]
        for path in named:
            if path not in reported and (number := last_number(observations, path)) is not None:
                reported[path] = number
        missing = [name for name in named if name not in reported]
        if term.weights is None and not reported:
            missing.append("score of a rubric")
        if missing and term.when_missing is None:
            return NoValue(why=f"the environment has reported no {', '.join(missing)}")
        weights = term.weights
        if weights is None:
            weights = {name: 1.0 for name in (reported or missing) if name not in term.gates}
        assumed = dict.fromkeys(missing, term.when_missing or 0.0)
        value = weighted(reported | assumed, weights, term.gates)
        total = check_number(self._name, value, episode)
        # Each part becomes a metric; those that the configuration names come first.
        names = [*(name for name in named if name in reported), *reported]
        shown = {name: reported[name] for name in [*dict.fromkeys(names)][:MAX_SCORES]}
        return TermValue(credits=[total], total=total, parts=shown)
