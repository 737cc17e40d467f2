"""Convert episodes to samples: their token ids, and which of these the model chose."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.algorithms.credit import trained_turns
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.errors import TrainingError
from openenv_pipe.types import (
    IMAGE_IDS,
    Episode,
    Finish,
    Group,
    Image,
    Images,
    Sample,
    TurnRole,
    path_to,
)

PROMPT_SHARE = 16  # at most so many tokens in all for each wanted token that the model chose


def build_samples(
    advantages: Sequence[GroupAdvantages], *, every_group: bool = False
) -> list[Sample]:
    """Build the samples of the episodes that are trained.

    every_group: also of groups without a signal, with advantages of 0
    """
    samples = []
    for each in advantages:
        if not (each.has_signal or every_group):
            continue
        for episode in each.trained:
            values = each.by_member.get(episode.member, [0.0] * len(episode.turns))
            samples += episode_samples(each.group.id, episode, values)
    return samples


def few_samples(groups: Sequence[Group], num_tokens: int) -> list[Sample]:
    """Build samples without advantages, from as many groups as possible.

    They end at `num_tokens` that the model chose, or `PROMPT_SHARE` times as many in all.
    """
    scored = [(group.id, episode) for group in groups for episode in group.scored]
    samples: list[Sample] = []
    num_chosen = num_read = 0
    for group, episode in sorted(scored, key=lambda each: each[1].member):
        if not trained_turns(episode):
            continue
        for sample in episode_samples(group, episode, [0.0] * len(episode.turns)):
            num_read += len(sample.token_ids)
            if samples and (num_chosen >= num_tokens or num_read > PROMPT_SHARE * num_tokens):
                return samples
            num_chosen += sum(sample.loss_mask)
            samples.append(sample)
    return samples


def count_uncomputed(
    advantages: Sequence[GroupAdvantages], *, every_group: bool = False
) -> Uncomputed:
    """Count the episodes that have no samples, and the tokens of those that are not masked.

    every_group: groups without a signal have samples
    """
    skipped = [] if every_group else [each for each in advantages if not each.has_signal]
    episodes = [episode for each in skipped for episode in each.trained]
    turns = [episode.turns[index] for episode in episodes for index in trained_turns(episode)]
    return Uncomputed(
        num_episodes=len(episodes) + sum(len(each.masked) for each in advantages),
        num_tokens=sum(len(turn.completion_ids) for turn in turns),
    )


def episode_samples(group: str, episode: Episode, advantages: Sequence[float]) -> list[Sample]:
    """Build the samples of an episode: one for each turn of the agent that no other continues.

    A sample is the path to that turn from its root. A turn on several paths is trained in the
    first of them only, so that each sampled token counts once in the loss.

    advantages: one value per turn

    Raises TrainingError: an image of a prompt is missing.
    """
    assert len(advantages) == len(episode.turns), "an advantage for each turn"
    parents = episode.parents
    continued: set[int] = set()  # by a turn of the agent, however much later
    for index, turn in enumerate(episode.turns):
        if turn.role is TurnRole.AGENT:
            continued.update(path_to(index, parents)[:-1])
    samples, trained = [], set[int]()
    for index, turn in enumerate(episode.turns):
        if turn.role is TurnRole.AGENT and index not in continued:
            path = path_to(index, parents)
            samples.append(_sample(group, episode, path, advantages, trained))
            trained.update(path)
    num_tokens = num_trained_tokens(samples)
    for sample in samples:
        sample.num_episode_tokens = num_tokens
    return samples


def _sample(
    group: str,
    episode: Episode,
    path: Sequence[int],
    advantages: Sequence[float],
    trained: set[int],
) -> Sample:
    """Build the sample of a path, in which the turns that are already `trained` are context.

    The row concatenates the turns' token ids; nothing is rendered or tokenised again. Tokens of
    prompts and of the environment have no logprob or advantage.
    """
    sample = Sample(
        group=group,
        member=episode.member,
        env=episode.task.env,
        num_episode_tokens=0,
        token_ids=[],
        loss_mask=[],
        logprobs=[],
        advantages=[],
    )
    for position, index in enumerate(path):
        turn = episode.turns[index]
        assert turn.usage is None, "a turn without token ids cannot be trained on"
        given, chosen = len(turn.prompt_ids), len(turn.completion_ids)
        is_trained = turn.role is TurnRole.AGENT and index not in trained
        if is_trained:
            sample.trained_turns.append(index)
        sample.token_ids += turn.prompt_ids + turn.completion_ids
        sample.loss_mask += [False] * given + [is_trained] * chosen
        is_answer = position > 0 and index not in trained
        answers = [is_answer] * given
        # After a reply that a limit cut off, the first token ends the turn: not the environment's.
        if is_answer and given and episode.turns[path[position - 1]].finish is Finish.LENGTH:
            answers[0] = False
        sample.environment_mask += answers + [False] * chosen
        sample.logprobs += [0.0] * given + (turn.logprobs if is_trained else [0.0] * chosen)
        sample.advantages += [0.0] * given + [advantages[index] if is_trained else 0.0] * chosen
    sample.images = _images_in(sample.token_ids, episode)
    return sample


def _images_in(token_ids: Sequence[int], episode: Episode) -> Images:
    """Return the images that stand in a sample's token ids. Raises TrainingError."""
    wanted = {token_id for token_id in token_ids if token_id >= IMAGE_IDS}
    if not wanted:
        return {}  # unlike NO_IMAGES, it can be sent to other ranks
    seen = {each.token_id: each for each in _find_images(episode.observations)}
    if missing := wanted - seen.keys():
        raise TrainingError(
            f"{len(missing)} images of the prompts of {episode.task.id} are in none of its "
            "observations; a custom adapter may only show images of observations"
        )
    return {token_id: seen[token_id] for token_id in sorted(wanted)}


def _find_images(value: Any) -> Iterator[Image]:
    if isinstance(value, Image):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _find_images(each)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        for each in value:
            yield from _find_images(each)


def num_trained_tokens(samples: Sequence[Sample]) -> int:
    return sum(sum(sample.loss_mask) for sample in samples)


def by_episode(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each episode, in the order of the episodes' first samples."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.group, sample.member), []).append(sample)
    return list(found.values())
