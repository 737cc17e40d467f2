"""Self-distillation: with a hint in the prompt, the policy is its own teacher.

The learner computes the logprobs of the same replies after the prompt with the hint, and uses them
as the reference's (`trainer.loss.kl.hint`).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openenv_pipe.algorithms.advantages import ZERO_SPREAD
from openenv_pipe.config.schema.loss import Hint
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.messages import split_tools
from openenv_pipe.types import Episode, Group, Sample

BEFORE = {
    "demonstration": "\n\nThis attempt went well:\n",
    "feedback": "\n\nThis is how your attempt will end:\n",
}
NUM_NOTE = 32  # tokens that the note about a cut takes at most


def add_hints(
    samples: Sequence[Sample],
    groups: Sequence[Group],
    hint: Hint,
    chat: ChatFormat,
    max_tokens: int,
) -> None:
    """Set `hinted` of each sample whose episode has a hint and that has room for it.

    max_tokens: of a sample with its hint; a longer hint is cut
    """
    by_group = {group.id: group for group in groups}
    for sample in samples:
        group = by_group[sample.group]
        episode = next(each for each in group.episodes if each.member == sample.member)
        is_feedback = hint == "feedback"
        text = _feedback(episode) if is_feedback else _demonstration(episode, group, chat)
        if text:
            sample.hinted = _hinted(sample, episode, BEFORE[hint] + text, chat, max_tokens)


def _feedback(episode: Episode) -> str:
    """Return why the last reply could not be used, or else what the environment returned last."""
    if reason := episode.turns[-1].unusable:
        return reason
    steps = [step for turn in episode.turns for step in turn.steps if not step.is_report]
    return json.dumps(steps[-1].observation, ensure_ascii=False) if steps else ""


def _demonstration(episode: Episode, group: Group, chat: ChatFormat) -> str:
    """Return the group's best episode after its first prompt, if it is better than this one."""
    best = max(group.scored, key=lambda each: each.reward)
    if best.reward <= episode.reward + ZERO_SPREAD:
        return ""
    ids = [each for turn in best.turns for each in turn.prompt_ids + turn.completion_ids]
    shown = ids[len(best.turns[0].prompt_ids) :] if best.turns else []
    text: str = chat.tokenizer.decode(shown, skip_special_tokens=True)
    return text


def _hinted(
    sample: Sample, episode: Episode, text: str, chat: ChatFormat, max_tokens: int
) -> Sample | None:
    """Return the sample with a text at the end of its first prompt; None if there is no room."""
    room = max_tokens - len(sample.token_ids) - NUM_NOTE
    if room <= NUM_NOTE:
        return None
    first = episode.turns[0]
    tools, (*others, last) = split_tools(first.messages)
    last = {**last, "content": last["content"] + chat.cut(text, room)}
    prompt = chat.first_ids([*others, last], tools)
    if len(prompt) - len(first.prompt_ids) + len(sample.token_ids) > max_tokens:
        return None

    def behind(nothing: Any, values: list[Any]) -> list[Any]:
        return [nothing] * len(prompt) + values[len(first.prompt_ids) :]

    return replace(
        sample,
        token_ids=prompt + sample.token_ids[len(first.prompt_ids) :],
        loss_mask=behind(False, sample.loss_mask),
        logprobs=behind(0.0, sample.logprobs),
        advantages=behind(0.0, sample.advantages),
        environment_mask=behind(False, sample.environment_mask),
    )
