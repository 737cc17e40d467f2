"""Convert episodes to samples: their token ids, and which of these the model chose."""

from collections.abc import Sequence

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.types import Episode, Sample


def build_samples(advantages: Sequence[GroupAdvantages]) -> list[Sample]:
    """Build the samples of groups with a signal; an episode without turns gives none."""
    return [
        build_sample(each.group.id, episode, each.by_member[episode.member])
        for each in advantages
        if each.has_signal
        for episode in each.group.scored
        if episode.turns
    ]


def build_sample(group: str, episode: Episode, advantages: Sequence[float]) -> Sample:
    """Build the sample of an episode. `advantages` has one value per turn.

    The row concatenates the turns' token ids; nothing is rendered or tokenised again. Tokens of
    prompts and of the environment have no loss, logprob or advantage.
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
