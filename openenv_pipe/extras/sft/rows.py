"""Read conversations from a file or a data set, and find what is wrong with a row."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import TaskDataset
from openenv_pipe.environments.tasks.data_sets import read_dataset
from openenv_pipe.environments.tasks.rows import json_rows, no_file_text, read_text
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sft.schema import ConversationsConfig
from openenv_pipe.models.chat.messages import in_order_of_calls
from openenv_pipe.types import Message, Tool

KEY = "trainer.warm_start.source"
NUM_SHOWN = 5  # bad rows in a message
ROLES = ("system", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
THOUGHTS_IN_PARTS = ("reasoning_details", "thinking_blocks")
# Keys by which other trainers choose the replies to imitate, with the value that changes nothing.
TRAINED = {
    **dict.fromkeys(("train", "training", "trainable", "loss", "loss_weight"), True),
    **dict.fromkeys(("mask", "masked"), False),
    "train_detail": None,
}
# Keys without which something else would be learned, with what to write in their place.
_MEDIA = dict.fromkeys(("image", "images", "audio", "audios", "videos"), "send text only")
UNREAD_IN_ROWS = {"functions": "write them as tools", **_MEDIA}
UNREAD_IN_MESSAGES = {
    "function_call": "write it as tool_calls, each with an id, and its result with the role tool",
    "refusal": "write it as content",
    **_MEDIA,
}


class BadRowError(Exception):
    """A row cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages as clients of chat completions write them, with the arguments of calls parsed."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()


def read_rows(source: ConversationsConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = Path(source.path).expanduser()
    is_parquet = path.suffix == ".parquet" and path.is_file()
    if is_parquet or not is_file(source):
        dataset = TaskDataset(
            type="dataset",
            path="parquet" if is_parquet else source.path,
            data_files=str(path) if is_parquet else None,
            split=source.split,
            **dict.fromkeys(("config", "revision", "columns", "seed_start")),
            required=[],
            labels=[],
            reset={},
        )
        for index, row in enumerate(read_dataset(dataset, KEY).resets):
            yield f"{source.path}, row {index + 1}", _without_nulls(row)
        return
    try:
        for line, row in json_rows(read_text(path)):
            yield f"{path}, line {line}", row
    except FileNotFoundError as error:
        raise ConfigError(f"{KEY}.path={source.path!r}: {no_file_text(path)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{KEY}.path={source.path!r}: {error}") from error


def is_file(source: ConversationsConfig) -> bool:
    path = Path(source.path).expanduser()
    return path.suffix in (".json", ".jsonl") or path.is_file()


def check_rows(source: ConversationsConfig) -> str:
    """Return how many conversations a file has. Raises ConfigError if it has none to imitate."""
    if not is_file(source):
        return ""  # it has to be downloaded first
    num_usable, bad = try_rows(source)
    if not num_usable:
        raise no_conversation(source, bad)
    return f"{num_usable} of {num_usable + len(bad)} conversations of {source.path} can be read"


def try_rows(source: ConversationsConfig) -> tuple[int, list[str]]:
    """Return how many rows can be read, and what is wrong with each other one."""
    num_usable, bad = 0, list[str]()
    for where, row in read_rows(source):
        try:
            conversation_of(row)
            num_usable += 1
        except BadRowError as error:
            bad.append(f"{where}: {error}")
    return num_usable, bad


def first_of(bad: Sequence[str]) -> str:
    """Return what is wrong with the first bad rows, line by line."""
    more = [f"and {len(bad) - NUM_SHOWN} more"] if len(bad) > NUM_SHOWN else []
    return "".join(f"\n  {each}" for each in [*bad[:NUM_SHOWN], *more])


def no_conversation(source: ConversationsConfig, bad: Sequence[str]) -> ConfigError:
    """Return the error of a source whose rows are all bad."""
    return ConfigError(
        f"{KEY}.path={source.path!r} has no conversation that can be used{first_of(bad)}\n"
        'expected rows such as {"messages": [{"role": "user", "content": "2+2?"}, '
        '{"role": "assistant", "content": "4"}]}'
    )


def _without_nulls(value: Any) -> Any:
    """Return an Arrow value as it was written: Arrow fills keys that only other rows have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRowError(f"it has no list `messages`; it has {', '.join(row) or 'nothing'}")
    _reject_keys(row, UNREAD_IN_ROWS, "it")
    checked = list[Message]()
    calls: Mapping[str, tuple[int, str]] = {}  # place and name of the last message's, by id
    results = list[tuple[int | None, Message]]()  # of these calls
    answered = set[str]()
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise BadRowError(f"{where} has the role {role!r}; expected one of {', '.join(ROLES)}")
        _reject_keys(message, UNREAD_IN_MESSAGES, where)
        if role == "tool":
            called = message.get("tool_call_id")
            if not isinstance(called, str) or called not in calls or called in answered:
                raise BadRowError(
                    f"{where} has tool_call_id={called!r}, which is not the id of an unanswered "
                    "call of the message before"
                )
            answered.add(called)
            place, name = calls[called]
            result = {"role": role, "name": name, "content": _text(message, where)}
            results.append((place, result))
            continue
        checked += in_order_of_calls(results)
        if role == "assistant" and (not checked or checked[-1]["role"] == "assistant"):
            raise BadRowError(f"{where} is from the assistant, but answers no message")
        checked.append(_read_message(message, where))
        made = checked[-1].get("tool_calls", ())
        calls = {each["id"]: (place, each["function"]["name"]) for place, each in enumerate(made)}
        if len(calls) < len(made):
            raise BadRowError(f"{where} has several tool_calls with one id; give each its own")
        results, answered = [], set()
    checked += in_order_of_calls(results)
    if not any(is_imitated(message) for message in checked):
        raise BadRowError("it has no message of the assistant, so there is nothing to imitate")
    return Conversation(messages=checked, tools=_tools(row.get("tools")))


def is_imitated(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    """Return a message that is no result. Raises BadRowError."""
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise BadRowError(f"{where} has the tool_calls {given!r:.60}; expected a list")
    calls = [_call(each, where) for each in given]
    read = {
        "role": message["role"],
        "content": _text(message, where, is_optional=bool(calls)),
        **({"tool_calls": calls} if calls else {}),
    }
    if message["role"] != "assistant":
        return read
    for key, usual in TRAINED.items():
        if message.get(key) not in (None, usual):
            raise BadRowError(
                f"{where} has {key}={message[key]!r:.60}; expected {usual!r}, or weight=0 in its "
                "place for a reply that is shown and not imitated"
            )
    if (weight := message.get("weight")) not in (None, 0, 1):
        raise BadRowError(
            f"{where} has weight={weight!r:.60}; expected 1, or 0 for a reply that is shown and "
            "not imitated"
        )
    thought = _thought(message, where)
    return {
        **read,
        **({"reasoning_content": thought} if thought else {}),
        **({"weight": 0} if weight == 0 else {}),
    }


def _thought(message: Mapping[str, Any], where: str) -> str:
    """Return the thought before a reply, which clients and data sets name differently."""
    found = {key: message[key] for key in THOUGHTS if message.get(key)}
    for key, thought in found.items():
        if not isinstance(thought, str):
            raise BadRowError(f"{where} has the {key} {thought!r:.60}; expected text")
    if len({*found.values()}) > 1:
        raise BadRowError(f"{where} has several thoughts, {' and '.join(found)}; keep one of them")
    if not found and (unread := next(filter(message.get, THOUGHTS_IN_PARTS), None)):
        raise BadRowError(f"{where} has {unread}; write the thought as text in reasoning_content")
    return next(iter(found.values()), "")


def _reject_keys(fields: Mapping[str, Any], unread: Mapping[str, str], where: str) -> None:
    for key, advice in unread.items():
        if fields.get(key):
            raise BadRowError(f"{where} has {key}={fields[key]!r:.60}; {advice}")


def _text(message: Mapping[str, Any], where: str, *, is_optional: bool = False) -> str:
    content = message.get("content")
    if content is None and is_optional:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        # As the parts of a program's message, and as vLLM shows them to templates that take text.
        content = "\n".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadRowError(f"{where} has the content {content!r:.60}; expected text")
    return content


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object. Raises BadRowError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(f"{where} has the tool call {call!r:.60}; expected a function's name")
    if not isinstance(call.get("id"), str):
        raise BadRowError(f"{where} calls {function['name']} without an id")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise BadRowError(f"{where} calls {function['name']} without a JSON object of arguments")
    named = {"name": function["name"], "arguments": dict(arguments)}
    return {"id": call["id"], "type": "function", "function": named}


def _tools(tools: Any) -> list[Tool]:
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools or []
        functions = [dict(each["function"]) for each in tools]
        if all(isinstance(each["name"], str) for each in functions):
            return [{"type": "function", "function": each} for each in functions]
    except (ValueError, TypeError, KeyError):
        pass
    raise BadRowError(f"its tools are {tools!r:.60}; expected a list of functions with names")
