"""What `env inspect model=...` tells a chat model about an environment: system message, examples.

It says what the environment is about, what an action is and which moves are legal. Random actions
that turned out to be good are shown as exchanges before the first message: small models follow
them where they ignore an instruction.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.schema_text import LIMITS, description_of
from openenv_pipe.environments.adapters.templates import (
    compile_optional,
    observation_message,
    observation_text,
)
from openenv_pipe.environments.client.metadata import ServerMetadata
from openenv_pipe.environments.random_policy import LEGAL
from openenv_pipe.environments.schemas import Schema, SchemaWalk
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.extras.lab.episodes import calls_tools
from openenv_pipe.extras.lab.templates import (
    first_template,
    following_template,
    is_plain,
    literal,
    template_of_schema,
)
from openenv_pipe.extras.lab.trial import Trial
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Action, Observation, Task

TOOL_SYSTEM = "Use the tools to do what you are asked."
JSON_SYSTEM = "Reply with one JSON object of this form and nothing else:\n{{ action_schema }}"
MAX_ABOUT = 800  # characters of a description
MAX_EXAMPLE = 400  # characters; a longer action is not shown
MAX_SHOWN = 1000  # characters of the message that an example replies to
MAX_EXAMPLES = 4  # different actions
MAX_MOVES = 32
MOVE = re.compile(r"\w(?:.{,38}\w)?")  # what a pattern finds as a word
# What OpenEnv's own classes say where the author of an environment says nothing.
NO_DESCRIPTION = re.compile(r"\w+ environment|Base class for .*", re.IGNORECASE)


def is_description(text: str) -> bool:
    """Return whether a text is from the author of an environment, not OpenEnv's own classes."""
    return bool(text) and not NO_DESCRIPTION.fullmatch(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    action: Action
    observation: Observation  # that it replies to
    is_first: bool  # the observation is that of the reset
    reward: float  # of its step
    task: Task
    is_best: bool  # another one has earned less; False: it only shows the form
    is_success: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompts:
    legal_field: str | None  # of observations: lists what is legal
    moves: Sequence[str]  # that are always legal
    is_closed: bool  # an action is one of few choices
    examples: Sequence[Example]  # the best first, with different actions
    takes_tools: bool  # the chat template describes tools, and how to call them

    @classmethod
    def of(
        cls, trial: Trial, env: EnvConfig, action: Schema, held_out: TaskSet, *, takes_tools: bool
    ) -> Self:
        """Choose the moves and the examples. held_out: the tasks of the evaluation."""
        listed = list(_listed(trial))
        moves = _always_legal([moves for _, moves in listed])
        is_closed = bool(moves or _choices(action))
        examples = _best_examples(trial, env, held_out, is_closed=is_closed)
        return cls(
            legal_field=listed[0][0] if listed else None,
            moves=moves,
            is_closed=is_closed,
            examples=examples,
            takes_tools=takes_tools,
        )

    def system(self, kind: str, description: ServerMetadata) -> str:
        """Return the template of the system message for an adapter's type."""
        action = without_metadata(description.action)
        about = {"": description.text}
        if kind != "tool":
            about["You are shown: "] = description_of(description.first_observation)
        if kind == "text":
            about["An action: "] = description_of(action)
        parts = [
            literal(f"{lead}{_sentence(text)}")
            for lead, text in about.items()
            if is_description(text)
        ]
        if kind == "tool":
            parts.append(TOOL_SYSTEM)
        else:
            parts.append(JSON_SYSTEM if kind == "json" else literal(self._request(action)))
        if self.legal_field and not self.moves:
            parts.append(f"It has to be one of the {self.legal_field} that you are shown.")
        if kind == "tool" and (shown := self._shown(kind)):
            parts.append(f"For example:\n{literal(self._written(kind, shown[0]))}")
        return "\n".join(filter(None, parts))

    def _request(self, action: Schema) -> str:
        """Ask for an action that is one text, with its choices or bounds.

        If moves are the choices, the field's description is left out, because it may name others.
        """
        ((name, field),) = action["properties"].items()
        field = SchemaWalk(action).resolved(field)
        bounds = [text.format(field[key]) for key, text in LIMITS.items() if key in field]
        listed = ", ".join(self.moves or field.get("enum", bounds))
        request = f"Reply with the {name} and nothing else{f': {listed}' if listed else ''}."
        about = "" if self.moves else _sentence(description_of(field))
        return f"{request} {about}".rstrip()

    def exchanges(self, kind: str, templates: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the examples as `env.adapter.examples` has them.

        templates: `first` and `following` of the adapter; empty: observations are shown as JSON.
        """
        return [
            {
                "user": literal(shortened(_message(example, templates), MAX_SHOWN)),
                "reply": literal(self._written(kind, example)),
            }
            for example in self._shown(kind)
        ]

    def _shown(self, kind: str) -> Sequence[Example]:
        """Return the examples that help: random letters show nothing unless they are right."""
        if kind == "text" and not self.is_closed:
            return [example for example in self.examples if example.is_success]
        return self.examples

    def _written(self, kind: str, example: Example) -> str:
        """Return an action as the model is to write it.

        If the chat template has its own form of calls, a call is described in words.
        """
        action = example.action
        if kind == "tool" and self.takes_tools:
            return f"call {action['tool_name']} with {spaced_json(action['arguments'])}"
        return written(kind, action, spaced_json)

    def notes(self, kind: str) -> Iterator[str]:
        shown = self._shown(kind)[:1] if kind == "tool" else self._shown(kind)
        if not shown:
            yield (
                "the prompt has no example, because no random action is a good one; write some "
                "into env.adapter.examples"
            )
        for example in shown:
            task = example.task
            why = f"it earned {example.reward:.3g}, the most of all random actions"
            if not example.is_best:
                why = f"it earned {example.reward:.3g}, and shows the form"
            yield (
                f"the prompt's example {shortened(self._written(kind, example), MAX_EXAMPLE)!r} is "
                f"a random action of task {task.id} (seed {task.seed}), which is not a task of "
                f"the evaluation; {why}"
            )


def _message(example: Example, templates: Mapping[str, str]) -> str:
    """Return what the adapter makes of the observation that an example replies to."""
    key = "first" if example.is_first else "following"
    template = compile_optional(key, templates.get(key))
    message = observation_message("user", template, example.observation, observation_text)
    return str(message["content"])


def written(kind: str, action: Action, dump: Callable[[Any], str]) -> str:
    """Return an action as a model writes it for an adapter's type. dump: writes JSON."""
    if kind == "text":
        return "".join(map(str, action.values()))
    if kind == "tool":
        call = {"name": action["tool_name"], "arguments": action.get("arguments", {})}
        return f"<tool_call>{dump(call)}</tool_call>"
    return dump(action)


def spaced_json(value: Any) -> str:
    """Return JSON in one line, with the spaces that language models write."""
    return json.dumps(value, ensure_ascii=False)


def indented_json(value: Any) -> str:
    """Return JSON as long as language models make it: in a code block of several lines."""
    return f"```json\n{json.dumps(value, ensure_ascii=False, indent=2)}\n```"


def _listed(trial: Trial) -> Iterator[tuple[str, list[Any]]]:
    for play in trial.plays:
        for observation in play.observations:
            for name, value in observation.items():
                if LEGAL.fullmatch(name) and isinstance(value, list) and value:
                    yield name, value


def _always_legal(seen: Sequence[Sequence[Any]]) -> Sequence[str]:
    """Return the legal moves if all lists of them are equal, and short lists of words; else none.

    Lists that differ are not a set of choices, which would lack the moves that were not seen.
    """
    moves = seen[0] if seen else []
    are_words = all(isinstance(each, str) and MOVE.fullmatch(each) for each in moves)
    are_same = all(sorted(map(str, each)) == sorted(map(str, moves)) for each in seen)
    return moves if are_words and are_same and len(moves) <= MAX_MOVES else ()


def _choices(action: Schema) -> Sequence[Any]:
    fields = list(without_metadata(action).get("properties", {}).values())
    return SchemaWalk(action).resolved(fields[0]).get("enum", ()) if len(fields) == 1 else ()


def _best_examples(
    trial: Trial, env: EnvConfig, held_out: TaskSet, *, is_closed: bool
) -> list[Example]:
    """Return different random actions whose steps earned most; ties go to better episodes.

    If an action is one of few choices, bad ones are shown too, each at its best, because a model
    prefers those that it is shown. No task of the evaluation is given away: tasks with its seed and
    keywords are left out, and where tasks look alike and may be the same, successes are left out,
    unless the prompt lists all choices anyway.

    is_closed: an action is one of few choices, which a prompt lists.
    """
    evaluated = {_key(held_out[index]) for index in range(len(held_out))}
    found: list[tuple[tuple[float, float], Example]] = []
    for play in trial.plays:
        if _key(play.task) in evaluated:
            continue
        for number, action in enumerate(play.actions):
            before, result = play.results[number], play.results[number + 1]
            reward = result.reward or 0.0
            is_success = reward >= env.success_reward
            gives_away = trial.are_tasks_alike and not is_closed and is_success
            is_long = len(spaced_json(action)) > MAX_EXAMPLE
            if gives_away or is_long or result.observation.get("error"):
                continue
            example = Example(
                action=action,
                observation=before.observation,
                is_first=number == 0,
                reward=reward,
                task=play.task,
                is_best=False,
                is_success=is_success,
            )
            found.append(((reward, play.reward), example))
    found.sort(key=lambda each: each[0], reverse=True)
    best, worst = (found[0][1].reward, found[-1][1].reward) if found else (0.0, 0.0)
    chosen: dict[str, Example] = {}
    for _, example in found:
        if is_closed or not chosen or example.reward == best > worst:
            example = replace(example, is_best=example.reward == best > worst)
            chosen.setdefault(spaced_json(example.action), example)
    return [*chosen.values()][:MAX_EXAMPLES]


def _key(task: Task) -> tuple[int, str]:
    return task.seed, json.dumps(task.reset, sort_keys=True, default=str)


def _sentence(text: str) -> str:
    """Return a description in one line that ends as a sentence; empty if there is none."""
    text = shortened(" ".join(text.split()), MAX_ABOUT)
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."


def adapter_block(
    description: ServerMetadata, trial: Trial | None = None, prompts: ChatPrompts | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the adapter's type, and the keys that differ from `conf/env/adapter/<type>.yaml`."""
    schema = without_metadata(description.action)
    if not schema.get("properties") or calls_tools(schema):
        return "tool", {"system": prompts.system("tool", description) if prompts else TOOL_SYSTEM}
    templates = {
        "first": template_of_schema(description.first_observation),
        "following": template_of_schema(description.observation),
    }
    episodes = [play.observations for play in trial.plays] if trial else []
    if trial is not None:
        templates["first"] = first_template(trial.firsts)
    if any(len(episode) > 1 for episode in episodes):
        templates["following"] = following_template(episodes)
    pattern = _pattern(schema, prompts.moves if prompts else ())
    kind = "json" if pattern is None else "text"
    if pattern is None and is_plain(episodes):
        templates = {}
    told: dict[str, Any] = {}
    if prompts is not None:
        told["system"] = prompts.system(kind, description)
        told["examples"] = prompts.exchanges(kind, templates)
    if pattern is None:
        return kind, told | templates
    return kind, {"system": _request(schema), **told, **templates, "pattern": pattern}


def _request(schema: Schema) -> str:
    ((name, field),) = schema["properties"].items()
    field = SchemaWalk(schema).resolved(field)
    choices = f": {', '.join(field['enum'])}" if "enum" in field else ""
    reply = f"Reply with the {name} and nothing else{choices}."
    return literal(" ".join(filter(None, (description_of(schema), reply, description_of(field)))))


def _pattern(schema: Schema, moves: Sequence[str]) -> str | None:
    """Return the pattern of an action with a single text field; None for any other.

    moves: the only legal values of the field, where its schema lists none.
    """
    fields = schema.get("properties", {})
    if len(fields) != 1:
        return None
    ((name, field),) = fields.items()
    field = SchemaWalk(schema).resolved(field)
    choices = field.get("enum", [""])
    if field.get("type") != "string" or not name.isidentifier() or not choices:
        return None
    if not all(isinstance(choice, str) and choice.isprintable() for choice in choices):
        return None
    if "enum" not in field:
        # The longest first, because a choice may begin with another one.
        choices = sorted(moves, key=len, reverse=True)
    if choices:
        return rf"\b(?P<{name}>{'|'.join(map(re.escape, choices))})\b"
    return rf"(?s)(?P<{name}>\S(?:.*\S)?)"
