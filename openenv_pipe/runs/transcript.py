"""Show episodes as text, for pages and terminals.

Of each observation only changed fields are shown, so a field that is missing is as it was before,
or still empty. Long texts are shortened in the middle; the episodes file has everything.
"""

import json
from collections.abc import Mapping
from typing import Any

from openenv_pipe.environments.images import find_references, replace_references
from openenv_pipe.models.chat.messages import calls_in_text, split_tools
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import code_block, for_markdown, visible
from openenv_pipe.types import Episode, Message, TurnRole

MAX_TEXT_LENGTH = 600  # characters of one reply
MAX_FIELD_LENGTH = 120  # characters of one field of an observation
ROLES = {
    TurnRole.RETRY: "a retry",
    TurnRole.AUXILIARY: "an auxiliary call",
    TurnRole.CONTEXT: "context",
}
MAX_IMAGES = 4  # of one episode that pages show
EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of fields that are left out at first sight


def transcript(episode: Episode) -> str:
    """Return what the environment and the model wrote, line by line."""
    seen, notes = episode.first_observation, branch_notes(episode)
    lines = ["env    " + _changes({}, seen)]
    for number, turn in enumerate(episode.turns, start=1):
        if notes[number - 1]:
            lines.append(f"       turn {number} {notes[number - 1]}")
        lines.append(
            f"{number:>2} llm " + (_cut(turn.reply.strip(), MAX_TEXT_LENGTH) or "(nothing)")
        )
        if turn.is_cut_off:
            lines.append(f"       cut off after {turn.num_completion_tokens} tokens")
        for step in turn.steps:
            changes = _changes(seen, step.observation)
            lines.append(f"env    {changes}  [reward {step.reward:.3g}]")
            seen = step.observation
        if turn.unusable is not None:
            lines.append(f"       unusable: {_cut(turn.unusable, MAX_TEXT_LENGTH)}")
    if episode.error:
        lines.append("error  " + _cut(episode.error, MAX_TEXT_LENGTH))
    if episode.unscored:
        lines.append("reward none: " + _cut(episode.unscored, MAX_TEXT_LENGTH))
    lines += [f"note   {_cut(note, MAX_TEXT_LENGTH)}" for note in episode.notes]
    if episode.exit_code is not None:
        lines.append(f"exit   code {episode.exit_code}")
    if episode.output:
        lines.append("output " + _cut(episode.output.strip(), MAX_TEXT_LENGTH))
    return "\n".join(line.replace("\n", "\n       ") for line in lines)


def whole_transcript(episode: Episode) -> str:
    """Return the messages as the model was shown them, and what it wrote, without cutting any."""
    lines, notes = list[str](), branch_notes(episode)
    for number, turn in enumerate(episode.turns, start=1):
        if notes[number - 1]:
            lines.append(f"({notes[number - 1]})")
        for message in turn.messages:
            lines.append(f"[{message['role']}] {message_text(message)}")
        lines.append(f"[{number} model] {turn.reply}")
        if turn.unusable is not None:
            lines.append(f"(unusable: {turn.unusable})")
        if turn.steps:
            lines.append(f"(reward {sum(step.reward for step in turn.steps):.3g})")
    if episode.error:
        lines.append(f"(error: {episode.error})")
    if episode.unscored:
        lines.append(f"(no reward: {episode.unscored})")
    return "\n".join(visible(redact(line)) for line in lines)


def message_text(message: Message) -> str:
    """Return a recorded message as text: its calls as the model writes them, tools indented."""
    tools, _ = split_tools([message])
    if tools:
        return json.dumps(tools, indent=2, ensure_ascii=False)
    return str(calls_in_text(message)["content"] or "")


def branch_notes(episode: Episode) -> list[str]:
    """Return a note for each turn that branches off or is not trained, and '' for the others."""
    found = []
    for index, (turn, parent) in enumerate(zip(episode.turns, episode.parents, strict=True)):
        notes = []
        if parent is None and index:
            notes.append("continues no other turn")
        elif parent is not None and parent != index - 1:
            notes.append(f"continues turn {parent + 1}")
        if turn.role is not TurnRole.AGENT:
            notes.append(f"is {ROLES[turn.role]}, and not trained")
        found.append(", ".join(notes))
    return found


def in_markdown(episode: Episode, run_folder: str) -> str:
    """Return the headline, the transcript and some images of an episode as Markdown.

    run_folder: the path to it from the page, such as `..`.
    """
    parts = [headline(episode), code_block(transcript(episode)), _images(episode, run_folder)]
    return "\n\n".join(part for part in parts if part)


def _images(episode: Episode, run_folder: str) -> str:
    """Return the first and the last images of an episode; empty without any."""
    seen = [
        reference["image"]
        for observation in episode.observations
        for reference in find_references(observation)
    ]
    paths = list(dict.fromkeys(seen))
    first = paths[: MAX_IMAGES // 2]
    shown = [*first, *paths[len(first) :][-MAX_IMAGES // 2 :]]
    links = [f"![image {paths.index(path) + 1}]({run_folder}/{path})" for path in shown]
    if left_out := len(paths) - len(shown):
        links.insert(len(first), f"({left_out} more)")
    return " ".join(links)


def headline(episode: Episode) -> str:
    """Summarise an episode in one line of Markdown."""
    result = "success" if episode.success else "no success"
    terms = ", ".join(
        f"{for_markdown(name)} {value:g}" for name, value in episode.reward_terms.items()
    )
    return (
        f"task {for_markdown(episode.task.id)}, {result}, {reward_text(episode)}"
        f"{f' ({terms})' if terms else ''}, {len(episode.turns)} turns, status {episode.status}"
    )


def reward_text(episode: Episode) -> str:
    """Return the reward as text, or that there is none; the transcript says why."""
    return f"reward {episode.reward:.3f}" if episode.is_scored else "no reward"


def _changes(seen: Mapping[str, Any], observation: Mapping[str, Any]) -> str:
    """Show the fields that differ from those seen before; of new ones, those with a content."""
    # They are compared as JSON: in Python, 0 equals False, and 1 equals 1.0.
    fields = {
        name: value
        for name, value in observation.items()
        if (json.dumps(seen[name]) != json.dumps(value) if name in seen else value not in EMPTY)
    }
    values = list(fields.values())
    if len(observation) == 1 and values and values[0] and isinstance(values[0], str):
        return _cut(values[0].strip(), MAX_TEXT_LENGTH)
    return "  ".join(f"{_field(name)}: {_field(value)}" for name, value in fields.items())


def _field(value: Any) -> str:
    value = replace_references(value, _image)
    is_text = isinstance(value, str) and value
    return _cut(value if is_text else json.dumps(value, ensure_ascii=False), MAX_FIELD_LENGTH)


def _image(reference: Mapping[str, Any]) -> str:
    size = f"{reference['width']} x {reference['height']} pixels"
    return f"[{size}: {reference['image']}]"


def _cut(text: str, longest: int) -> str:
    text = visible(redact(text))
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
