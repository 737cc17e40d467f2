"""Adapter `tool`: lists an MCP environment's tools at reset, and calls those in replies."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.config.schema import ToolAdapterConfig
from openenv_pipe.environments.adapters.base import STILL_THINKING, Ask, UnusableReply
from openenv_pipe.environments.adapters.templates import (
    compact_json,
    compile_optional,
    compile_template,
    example_messages,
    observation_message,
    observation_text,
    render_message,
)
from openenv_pipe.environments.client.session import LIST_TOOLS
from openenv_pipe.environments.schemas import require_schema
from openenv_pipe.errors import ConfigError, SessionError, StepRejectedError
from openenv_pipe.models.replies.calls import FORM
from openenv_pipe.models.replies.reader import as_reply
from openenv_pipe.models.replies.reply import Call
from openenv_pipe.registry import if_command
from openenv_pipe.types import Action, Message, Observation, Opening, Tool

NO_PARAMETERS = {"type": "object", "properties": {}}
MAX_SEEN_LENGTH = 200  # characters of an answer in an error message
MAX_PROBLEMS = 3  # broken calls of one reply that are described


class ToolAdapter:
    """Tools as actions: the chat template describes them, results have the role `tool`.

    The environment answers a call of an unknown tool, or one with bad arguments, with an error that
    the model reads as the call's result.
    """

    def __init__(self, config: ToolAdapterConfig) -> None:
        """Raises ConfigError for an invalid template, and for an example that calls a tool."""
        for number, example in enumerate(config.examples):
            if as_reply(example.reply).calls:
                raise ConfigError(
                    f"env.adapter.examples.{number}.reply={example.reply!r:.200} has a tool call, "
                    "which a model would be shown in another form than it writes, and without a "
                    "result; describe calls in env.adapter.system"
                )
        self._system = compile_optional("system", config.system)
        self._examples = example_messages(config.examples)
        self._first = compile_optional("first", config.first)
        self._following = compile_optional("following", config.following)
        self._unusable = compile_template("unusable", config.unusable)
        self._plain_reply_ends = config.plain_reply == "final"

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        """Raises ConfigError if the environment has no tools, SessionError if listing fails."""
        task = observation_message("user", self._first, observation, observation_text)
        messages = [*self._examples, task]
        if self._system is not None:
            messages.insert(0, render_message("system", self._system, observation))
        try:
            return Opening(messages=messages, tools=tools_of(await ask(LIST_TOOLS)))
        except StepRejectedError as rejection:
            if rejection.code != "VALIDATION_ERROR":
                raise
            raise _no_tools(str(rejection)) from None

    def read(self, reply: str) -> list[Action]:
        read = as_reply(reply)
        actions = [call_action(call.name, call.arguments) for call in read.made_calls]
        if problems := _problems(read.calls):
            raise UnusableReply(problems, actions)
        if actions:
            return actions
        if read.is_thinking:
            raise UnusableReply(STILL_THINKING)
        if not self._plain_reply_ends:
            unknown = "".join(f"; there is no tool {call.name!r:.80}" for call in read.calls[:1])
            raise UnusableReply(f"there is no tool call in the reply; a call is {FORM}{unknown}")
        return []

    def follow(self, observation: Observation) -> list[Message]:
        message = observation_message("tool", self._following, observation, result_text)
        return [{**message, "name": str(observation.get("tool_name", ""))}]

    def reject(self, why: str) -> list[Message]:
        return [render_message("user", self._unusable, {"why": why})]


def call_action(name: str, arguments: Mapping[str, Any]) -> Action:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _problems(calls: Sequence[Call]) -> str:
    """Return what is wrong with broken calls; empty if there are none."""
    broken = [
        f"tool call {number}: {call.problem}"
        for number, call in enumerate(calls, start=1)
        if call.is_broken
    ]
    more = len(broken) - MAX_PROBLEMS
    return "; ".join(broken[:MAX_PROBLEMS] + ([f"and {more} more like these"] if more > 0 else []))


def tools_of(listing: Observation) -> list[Tool]:
    """Convert the answer to `list_tools`, in OpenEnv's or MCP's form, for chat templates.

    Raises:
        SessionError: The environment answered with an error.
        ConfigError: The answer has no tools, or tools that cannot be described.
    """
    tools, metadata = listing.get("tools"), listing.get("metadata")
    if not tools and isinstance(metadata, Mapping) and "error" in metadata:
        raise SessionError(f"the environment cannot list its tools: {metadata['error']!s:.2000}")
    if not isinstance(tools, list) or not tools or not all(map(_is_tool, tools)):
        raise _no_tools(compact_json(listing)[:MAX_SEEN_LENGTH])
    return [_tool(each) for each in tools]


def _is_tool(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


def _tool(tool: Mapping[str, Any]) -> Tool:
    """Raises ConfigError if the tool's parameters are not described by a JSON Schema."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or NO_PARAMETERS
    require_schema(parameters, f"the schema of the tool {tool['name']!r:.80}")
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": str(tool.get("description") or ""),
            "parameters": parameters,
        },
    }


def result_text(observation: Observation) -> str:
    """Return a call's result as text: the error, the content's texts, or else all fields."""
    if error := observation.get("error"):
        return f"Error: {error.get('message') if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if result is None:
        return observation_text(observation)
    content = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(content, list):
        return result if isinstance(result, str) else compact_json(result)
    return "\n".join(map(_content_text, content))


def _content_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else compact_json(part)


def _no_tools(seen: str) -> ConfigError:
    return ConfigError(
        "env.adapter.type=tool is for environments with MCP tools, and this one answered "
        f"list_tools with {seen}; use env.adapter.type=json or text"
        + if_command("env", ", which `openenv-pipe env inspect` tells apart")
    )
