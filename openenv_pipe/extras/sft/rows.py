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
from openenv_pipe.types import Message, Tool

KEY = "trainer.warm_start.source"
NUM_SHOWN = 5  # bad rows in a message
ROLES = ("system", "user", "assistant", "tool")


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
    bad, num_usable = list[str](), 0
    for where, row in read_rows(source):
        try:
            conversation_of(row)
            num_usable += 1
        except BadRowError as error:
            bad.append(f"{where}: {error}")
    if not num_usable:
        raise no_conversation(source, bad)
    return f"{num_usable} of {num_usable + len(bad)} conversations of {source.path} can be read"


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
    open_calls: dict[str, str] = {}  # the names of the calls that no result has answered, by id
    checked = list[Message]()
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise BadRowError(f"{where} has the role {role!r}; expected one of {', '.join(ROLES)}")
        before = checked[-1]["role"] if checked else None
        if role == "tool":
            called = message.get("tool_call_id")
            if not isinstance(called, str) or called not in open_calls:
                raise BadRowError(
                    f"{where} has tool_call_id={called!r}, which is not the id of an unanswered "
                    "call of the message before"
                )
            name = open_calls.pop(called)
            checked.append({"role": role, "name": name, "content": _text(message, where)})
            continue
        if role == "assistant" and before in (None, "assistant"):
            raise BadRowError(f"{where} is from the assistant, but answers no message")
        given = message.get("tool_calls") or []
        if not isinstance(given, list):
            raise BadRowError(f"{where} has the tool_calls {given!r:.60}; expected a list")
        calls = [_call(each, where) for each in given]
        open_calls = {each["id"]: each["function"]["name"] for each in calls}
        thought = message.get("reasoning_content")
        checked.append(
            {
                "role": role,
                "content": _text(message, where, is_optional=bool(calls)),
                **({"tool_calls": calls} if calls else {}),
                **({"reasoning_content": thought} if isinstance(thought, str) else {}),
            }
        )
    if all(message["role"] != "assistant" for message in checked):
        raise BadRowError("it has no message of the assistant, so there is nothing to imitate")
    return Conversation(messages=checked, tools=_tools(row.get("tools")))


def _text(message: Mapping[str, Any], where: str, *, is_optional: bool = False) -> str:
    content = message.get("content")
    if content is None and is_optional:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
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
