"""Episodes to samples: the ids that were sampled, and which of them the model chose."""

from collections.abc import Sequence

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.types import Episode, Sample


def build_samples(advantages: Sequence[GroupAdvantages]) -> list[Sample]:
    """The samples of groups that have a signal; an episode that ended before its first turn has
    none."""
    return [
        build_sample(each.group.id, episode, each.by_member[episode.member])
        for each in advantages
        if each.has_signal
        for episode in each.group.scored
        if episode.turns
    ]


def build_sample(group: str, episode: Episode, advantages: Sequence[float]) -> Sample:
    """One row of an episode. `advantages` has one value per turn.

    Nothing is rendered or tokenised again: the row is the turns' own ids, one after the other.
    The prompt's tokens and the environment's carry no loss, logprob or advantage.
    """
    sample = Sample(group=group, token_ids=[], loss_mask=[], logprobs=[], advantages=[])
    for turn, advantage in zip(episode.turns, advantages, strict=True):
        assert turn.usage is None, "a turn without token ids cannot be trained on"
        given, chosen = len(turn.prompt_ids), len(turn.completion_ids)
        sample.token_ids += turn.prompt_ids + turn.completion_ids
        sample.loss_mask += [False] * given + [True] * chosen
        sample.logprobs += [0.0] * given + turn.logprobs
        sample.advantages += [0.0] * given + [advantage] * chosen
    return sample
