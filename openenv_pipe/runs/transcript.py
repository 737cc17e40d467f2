"""Episodes as text to read, on paper and on terminals.

Of an observation only what has changed is shown. Long texts are cut in the middle and control
characters shown as dots; the episodes file has all.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from openenv_pipe.types import Episode

LONGEST_TEXT = 600  # characters of one reply
LONGEST_FIELD = 120  # characters of one field of an observation


def transcript(episode: Episode) -> str:
    """What the environment and the model said to each other, line by line."""
    seen = episode.first_observation
    lines = ["env    " + _changes({}, seen)]
    for number, turn in enumerate(episode.turns, start=1):
        lines.append(f"{number:>2} llm " + (_cut(turn.reply.strip(), LONGEST_TEXT) or "(nothing)"))
        for step in turn.steps:
            changes = _changes(seen, step.observation)
            lines.append(f"env    {changes}  [reward {step.reward:.3g}]")
            seen = step.observation
        if turn.unusable is not None:
            lines.append(f"       unusable: {_cut(turn.unusable, LONGEST_TEXT)}")
    if episode.error:
        lines.append("error  " + _cut(episode.error, LONGEST_TEXT))
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


def _changes(seen: Mapping[str, Any], observation: Mapping[str, Any]) -> str:
    """The fields that differ from what was seen before, empty ones left out."""
    fields = {
        name: value for name, value in observation.items() if value and value != seen.get(name)
    }
    values = list(fields.values())
    if len(observation) == 1 and values and isinstance(values[0], str):
        return _cut(values[0].strip(), LONGEST_TEXT)
    return "  ".join(f"{name}: {_field(value)}" for name, value in fields.items())


def _field(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _cut(text, LONGEST_FIELD)


def _cut(text: str, longest: int) -> str:
    text = "".join(char if char.isprintable() or char == "\n" else "·" for char in text)
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
