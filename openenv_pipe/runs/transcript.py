"""Episodes as text to read, on paper and on terminals.

Long texts are cut in the middle and control characters shown as dots; the episodes file has all.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from openenv_pipe.types import Episode, Turn

LONGEST_TEXT = 600  # characters of one reply or observation


def transcript(episode: Episode) -> str:
    """What the environment and the model said to each other, line by line."""
    lines = ["env    " + _observation(episode.first_observation)]
    for number, turn in enumerate(episode.turns, start=1):
        lines += _turn_lines(number, turn)
    if episode.error:
        lines.append("error  " + _cut(episode.error))
    return "\n".join(line.replace("\n", "\n       ") for line in lines)


def headline(episode: Episode) -> str:
    """How an episode went, in one line."""
    result = "success" if episode.success else "no success"
    terms = ", ".join(f"{name} {value:g}" for name, value in episode.reward_terms.items())
    return (
        f"task {episode.task.id}, {result}, reward {episode.reward:.3f}"
        f"{f' ({terms})' if terms else ''}, {len(episode.turns)} turns, status {episode.status}"
    )


def fenced(text: str) -> str:
    """A Markdown code block around any text, whatever backticks it contains."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _turn_lines(number: int, turn: Turn) -> list[str]:
    reply = f"{number:>2} llm " + (_cut(turn.reply.strip()) or "(nothing)")
    if turn.unusable is not None:
        return [reply, f"       unusable: {_cut(turn.unusable)}"]
    return [reply, f"env    {_observation(turn.observation)}  (reward {turn.reward:.3g})"]


def _observation(observation: Mapping[str, Any]) -> str:
    """A text field alone stands for itself, anything else is JSON."""
    values = list(observation.values())
    if len(values) == 1 and isinstance(values[0], str):
        return _cut(values[0].strip())
    return _cut(json.dumps(observation, ensure_ascii=False))


def _cut(text: str) -> str:
    text = "".join(char if char.isprintable() or char == "\n" else "·" for char in text)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
