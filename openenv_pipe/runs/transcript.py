"""Show episodes as text, for pages and terminals.

Of each observation only changed fields are shown. Long texts are shortened in the middle; the
episodes file has everything.
"""

import json
from collections.abc import Mapping
from typing import Any

from openenv_pipe.system.foreign_text import for_markdown, visible
from openenv_pipe.system.secrets import redact
from openenv_pipe.types import Episode

MAX_TEXT_LENGTH = 600  # characters of one reply
MAX_FIELD_LENGTH = 120  # characters of one field of an observation


def transcript(episode: Episode) -> str:
    """Return what the environment and the model wrote, line by line."""
    seen = episode.first_observation
    lines = ["env    " + _changes({}, seen)]
    for number, turn in enumerate(episode.turns, start=1):
        lines.append(
            f"{number:>2} llm " + (_cut(turn.reply.strip(), MAX_TEXT_LENGTH) or "(nothing)")
        )
        for step in turn.steps:
            changes = _changes(seen, step.observation)
            lines.append(f"env    {changes}  [reward {step.reward:.3g}]")
            seen = step.observation
        if turn.unusable is not None:
            lines.append(f"       unusable: {_cut(turn.unusable, MAX_TEXT_LENGTH)}")
    if episode.error:
        lines.append("error  " + _cut(episode.error, MAX_TEXT_LENGTH))
    return "\n".join(line.replace("\n", "\n       ") for line in lines)


def headline(episode: Episode) -> str:
    """Summarise an episode in one line of Markdown."""
    result = "success" if episode.success else "no success"
    terms = ", ".join(
        f"{for_markdown(name)} {value:g}" for name, value in episode.reward_terms.items()
    )
    return (
        f"task {for_markdown(episode.task.id)}, {result}, reward {episode.reward:.3f}"
        f"{f' ({terms})' if terms else ''}, {len(episode.turns)} turns, status {episode.status}"
    )


def _changes(seen: Mapping[str, Any], observation: Mapping[str, Any]) -> str:
    """Show the fields that differ from those seen before, without empty ones."""
    fields = {
        name: value for name, value in observation.items() if value and value != seen.get(name)
    }
    values = list(fields.values())
    if len(observation) == 1 and values and isinstance(values[0], str):
        return _cut(values[0].strip(), MAX_TEXT_LENGTH)
    return "  ".join(f"{_field(name)}: {_field(value)}" for name, value in fields.items())


def _field(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _cut(text, MAX_FIELD_LENGTH)


def _cut(text: str, longest: int) -> str:
    text = visible(redact(text))
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
