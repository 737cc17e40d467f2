"""The dialects of OpenEnv's proxy, with changes to those of OpenAI.

OpenAI's client rejects the proxy's answers in the Responses dialect: its messages have an id when
they begin and none when they end, its events name no item, and they are not numbered. The proxy
drops tools in a namespace, the form in which Codex sends those of its MCP servers; here the model
sees them as functions, whose names begin with the namespace.
"""

import itertools
import secrets
from collections.abc import Mapping
from typing import Any

from openenv_pipe.extras.agents.http.capture import (
    APIType,
    OpenAIChatTransformer,
    OpenAIResponsesTransformer,
    TransformManager,
    UpstreamRequestError,
)
from openenv_pipe.extras.agents.http.conversation_parts import find_unshown
from openenv_pipe.extras.agents.http.request_fields import (
    IGNORED,
    find_ignored,
    require_conversation,
)


class ResponsesTransformer(OpenAIResponsesTransformer):  # type: ignore[misc]  # no types
    def transform_request(self, body: dict[str, Any]) -> dict[str, Any]:
        given = body.get("input")
        items = [_with_whole_name(item) for item in given] if isinstance(given, list) else given
        tools = body.get("tools")
        flat = (
            [each for tool in tools for each in _flat(tool)] if isinstance(tools, list) else tools
        )
        changed = {"input": items, "tools": flat}
        request: dict[str, Any] = super().transform_request(
            {**body, **{key: value for key, value in changed.items() if key in body}}
        )
        return request

    def transform_response(
        self, response: dict[str, Any], original_request: dict[str, Any]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = super().transform_response(response, original_request)
        names = _names_of(original_request)
        for item in answer.get("output", ()):
            item.setdefault("id", f"msg_{secrets.token_hex(12)}")
            _complete_content(item)
            _split_name(item, names)
        return answer

    def create_stream_state(self, original_request: dict[str, Any]) -> "_StreamState":
        state = super().create_stream_state(original_request)
        return _StreamState(state, _names_of(original_request))


class _StreamState:
    def __init__(self, state: Any, names: Mapping[str, tuple[str, str]]) -> None:
        self._state = state
        self._names = names
        self._numbers = itertools.count()
        self._ids: dict[int, str] = {}  # of the answer's items, by their place in it

    def process_chunk(self, chunk: Mapping[str, Any], is_first: bool) -> list[dict[str, Any]]:
        return self._completed(self._state.process_chunk(chunk, is_first=is_first))

    def finalize(self) -> list[dict[str, Any]]:
        return self._completed(self._state.finalize())

    def _completed(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            event["sequence_number"] = next(self._numbers)
            place = event.get("output_index")
            if place is not None and "item" in event:
                self._complete_item(event["item"], place)
            elif place is not None:
                event.setdefault("item_id", self._ids[place])
            for index, each in enumerate(event.get("response", {}).get("output", ())):
                self._complete_item(each, index)
        return events

    def _complete_item(self, item: dict[str, Any], place: int) -> None:
        if "id" not in item:
            item["id"] = self._ids[place]
        self._ids[place] = item["id"]
        _complete_content(item)
        _split_name(item, self._names)


def _complete_content(item: Mapping[str, Any]) -> None:
    for part in item.get("content") or ():
        if part.get("type") == "output_text":
            part.setdefault("annotations", [])


def _flat(tool: Any) -> list[Any]:
    """Return a tool, or the tools of a namespace with their whole names."""
    if not _is_namespace(tool):
        return [tool]
    return [{**each, "name": _whole_name(tool, each)} for each in tool["tools"] if "name" in each]


def _names_of(request: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each tool in a namespace, by its whole name."""
    return {
        _whole_name(tool, each): (str(tool.get("name")), str(each["name"]))
        for tool in request.get("tools") or ()
        if _is_namespace(tool)
        for each in tool["tools"]
        if "name" in each
    }


def _is_namespace(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return False
    tools = tool.get("tools")
    return isinstance(tools, list) and all(isinstance(each, dict) for each in tools)


def _whole_name(namespace: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
    return f"{namespace.get('name')}__{tool['name']}"


def _with_whole_name(item: Any) -> Any:
    """Return a call of a tool in a namespace as the model has made it; other items as they are."""
    if not isinstance(item, dict) or not item.get("namespace"):
        return item
    return {**item, "name": f"{item['namespace']}__{item.get('name')}"}


def _split_name(item: dict[str, Any], names: Mapping[str, tuple[str, str]]) -> None:
    if item.get("type") == "function_call" and item.get("name") in names:
        item["namespace"], item["name"] = names[item["name"]]


class ChatTransformer(OpenAIChatTransformer):  # type: ignore[misc]  # openenv has no types
    """Leaves out what the proxy records and clients do not ask for: most of an answer's bytes."""

    def transform_response(
        self, response: dict[str, Any], original_request: dict[str, Any]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = super().transform_response(response, original_request)
        answer = {key: value for key, value in answer.items() if key != "prompt_token_ids"}
        answer["choices"] = [
            {key: value for key, value in choice.items() if key != "token_ids"}
            for choice in answer["choices"]
        ]
        if not original_request.get("logprobs"):
            for choice in answer["choices"]:
                choice["logprobs"] = None
        return answer


_CHANGED = {
    APIType.OPENAI_CHAT: ChatTransformer(),
    APIType.OPENAI_RESPONSES: ResponsesTransformer(),
}


class Dialects(TransformManager):  # type: ignore[misc]
    def get(self, api_type: APIType) -> Any:
        return _Noting(api_type, _CHANGED.get(api_type) or super().get(api_type))


class _Noting:
    """A dialect whose translated requests list the fields that have no effect."""

    def __init__(self, dialect: APIType, transformer: Any) -> None:
        self._dialect = dialect
        self._transformer = transformer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)

    def transform_request(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            ignored = find_ignored(self._dialect, body) | find_unshown(self._dialect, body)
            require_conversation(self._dialect, body)
            return {**self._transformer.transform_request(body), IGNORED: ignored}
        except UpstreamRequestError:
            raise
        except ValueError as error:
            raise UpstreamRequestError(str(error)) from error
        except (TypeError, AttributeError, LookupError) as error:
            # A wrong type that `check_shape` does not find, in what the proxy translates.
            name = self._dialect.value
            text = f"the request does not have the form of {name}: {type(error).__name__}: {error}"
            raise UpstreamRequestError(text) from error
