"""What `env inspect model=...` tells a chat model of an environment: the text of the system.

It says what the environment is about, what an action is and which moves are legal, and shows one
action that was found to be good when random ones were played.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.schema_text import LIMITS, description_of
from openenv_pipe.environments.client.metadata import ServerMetadata
from openenv_pipe.environments.random_policy import LEGAL
from openenv_pipe.environments.schemas import Schema, SchemaWalk
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.extras.lab.templates import literal
from openenv_pipe.extras.lab.trial import Trial
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Action, Task

TOOL_SYSTEM = "Use the tools to do what you are asked."
JSON_SYSTEM = "Reply with one JSON object of this form and nothing else:\n{{ action_schema }}"
MAX_ABOUT = 800  # characters of a description
MAX_EXAMPLE = 400  # characters; a longer action is not shown
MAX_MOVES = 32
MOVE = re.compile(r"\w(?:.{,38}\w)?")  # what a pattern finds as a word
# What OpenEnv's own classes say where the author of an environment says nothing.
NO_DESCRIPTION = re.compile(r"\w+ environment|Base class for .*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An action of a random episode, and where it comes from."""

    action: Action
    reward: float  # of its step
    task: Task
    is_best: bool  # another one has earned less; else it shows the form alone
    is_success: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompts:
    """What a trial has found out for a chat model."""

    legal_field: str | None  # of observations: lists what is legal
    moves: Sequence[str]  # that are always legal
    is_closed: bool  # an action is one of few choices
    example: Example | None
    takes_tools: bool  # the chat template describes tools, and how to call them

    @classmethod
    def of(
        cls,
        trial: Trial,
        env: EnvConfig,
        action: Schema,
        held_out: TaskSet,
        *,
        takes_tools: bool,
    ) -> Self:
        """Choose the moves and the example. held_out: the tasks of the evaluation."""
        listed = list(_listed(trial))
        moves = _always_legal([moves for _, moves in listed])
        is_closed = bool(moves or _choices(action))
        example = _best_example(trial, env, held_out, is_closed=is_closed)
        return cls(
            legal_field=listed[0][0] if listed else None,
            moves=moves,
            is_closed=is_closed,
            example=example,
            takes_tools=takes_tools,
        )

    def system(self, kind: str, description: ServerMetadata) -> str:
        """Return the template of the system's text for an adapter's type."""
        action = without_metadata(description.action)
        about = {"": description.text}
        if kind != "tool":
            about["You are shown: "] = description_of(description.first_observation)
        if kind == "text":
            about["An action: "] = description_of(action)
        parts = [
            literal(f"{lead}{_sentence(text)}")
            for lead, text in about.items()
            if text and not NO_DESCRIPTION.fullmatch(text)
        ]
        if kind == "tool":
            parts.append(TOOL_SYSTEM)
        else:
            parts.append(JSON_SYSTEM if kind == "json" else literal(self._request(action)))
        if self.legal_field and not self.moves:
            parts.append(f"It has to be one of the {self.legal_field} that you are shown.")
        if (example := self._example_text(kind)) is not None:
            parts.append(f"For example:\n{literal(example)}")
        return "\n".join(filter(None, parts))

    def _request(self, action: Schema) -> str:
        """Ask for an action that is one text, with its choices or bounds.

        Where moves are the choices, the field's description may name others, such as short forms.
        """
        ((name, field),) = action["properties"].items()
        field = SchemaWalk(action).resolved(field)
        bounds = [text.format(field[key]) for key, text in LIMITS.items() if key in field]
        listed = ", ".join(self.moves or field.get("enum", bounds))
        request = f"Reply with the {name} and nothing else{f': {listed}' if listed else ''}."
        about = "" if self.moves else _sentence(description_of(field))
        return f"{request} {about}".rstrip()

    def _example_text(self, kind: str) -> str | None:
        """Return the example as a model is to write it; None if it would be of no help.

        Random letters show nothing unless they are right. Where the chat template describes calls,
        these have a form of its own.
        """
        if self.example is None:
            return None
        if kind == "text" and not (self.is_closed or self.example.is_success):
            return None
        action = self.example.action
        if kind == "tool" and self.takes_tools:
            return f"call {action['tool_name']} with {spaced_json(action['arguments'])}"
        return written(kind, action, spaced_json)

    def notes(self, kind: str) -> Iterator[str]:
        """Say where the example comes from."""
        if (text := self._example_text(kind)) is None:
            yield (
                "the prompt has no example, because no random action is a good one; write one "
                "into env.adapter.system"
            )
            return
        example = self.example
        assert example is not None
        task = example.task
        why = f"it earned {example.reward:.3g}, the most of all random actions"
        if not example.is_best:
            why = "no random action earned more than another, so it shows the form alone"
        yield (
            f"the example of the prompt, {shortened(text, MAX_EXAMPLE)!r}, is a random action of "
            f"task {task.id} (seed {task.seed}), which is no task of the evaluation; {why}"
        )


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
    """Yield the lists of legal moves that observations have, with the names of their fields."""
    for play in trial.plays:
        for observation in play.observations:
            for name, value in observation.items():
                if LEGAL.fullmatch(name) and isinstance(value, list) and value:
                    yield name, value


def _always_legal(seen: Sequence[Sequence[Any]]) -> Sequence[str]:
    """Return the moves that are legal whenever some are; empty if these differ.

    Lists that differ are no set of choices: it would lack the moves that were not seen.
    """
    moves = seen[0] if seen else []
    are_words = all(isinstance(each, str) and MOVE.fullmatch(each) for each in moves)
    are_same = all(sorted(map(str, each)) == sorted(map(str, moves)) for each in seen)
    return moves if are_words and are_same and len(moves) <= MAX_MOVES else ()


def _choices(action: Schema) -> Sequence[Any]:
    """Return the values of an action's only field, if these are listed."""
    fields = list(without_metadata(action).get("properties", {}).values())
    return SchemaWalk(action).resolved(fields[0]).get("enum", ()) if len(fields) == 1 else ()


def _best_example(
    trial: Trial, env: EnvConfig, held_out: TaskSet, *, is_closed: bool
) -> Example | None:
    """Return the random action whose step earned most, the first of equals; None if there is none.

    It gives no task of the evaluation away: not one with the same seed and keywords, and not all
    of them, where tasks look alike and may be the same.

    is_closed: an action is one of few choices, which a prompt lists anyway.
    """
    evaluated = {_key(held_out[index]) for index in range(len(held_out))}
    found: list[tuple[float, Action, Task]] = []
    for play in trial.plays:
        if _key(play.task) in evaluated:
            continue
        for action, result in zip(play.actions, play.results[1:], strict=True):
            reward = result.reward or 0.0
            gives_away = trial.are_tasks_alike and not is_closed and reward >= env.success_reward
            is_long = len(spaced_json(action)) > MAX_EXAMPLE
            if not (gives_away or is_long or result.observation.get("error")):
                found.append((reward, action, play.task))
    if not found:
        return None
    reward, action, task = max(found, key=lambda each: each[0])
    return Example(
        action=action,
        reward=reward,
        task=task,
        is_best=reward > min(each[0] for each in found),
        is_success=reward >= env.success_reward,
    )


def _key(task: Task) -> tuple[int, str]:
    return task.seed, json.dumps(task.reset, sort_keys=True, default=str)


def _sentence(text: str) -> str:
    """Return a description in one line that ends as a sentence; empty if there is none."""
    text = shortened(" ".join(text.split()), MAX_ABOUT)
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."
