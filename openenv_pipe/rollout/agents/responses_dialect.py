"""Complete the proxy's answers in OpenAI's Responses dialect, which OpenAI's client refuses.

Its messages have an id when they begin and none when they end, its events name no item, and they
are not numbered.
"""

import itertools
import secrets
from collections.abc import Mapping
from typing import Any

from openenv_pipe.rollout.agents.capture import OpenAIResponsesTransformer


class ResponsesTransformer(OpenAIResponsesTransformer):  # type: ignore[misc]  # no types
    """In the place of the proxy's own transformer."""

    def transform_response(
        self, response: dict[str, Any], original_request: dict[str, Any]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = super().transform_response(response, original_request)
        for item in answer.get("output", ()):
            item.setdefault("id", f"msg_{secrets.token_hex(12)}")
            _complete_content(item)
        return answer

    def create_stream_state(self, original_request: dict[str, Any]) -> "_StreamState":
        return _StreamState(super().create_stream_state(original_request))


class _StreamState:
    """Completes the events of one answer."""

    def __init__(self, state: Any) -> None:
        self._state = state
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


def _complete_content(item: Mapping[str, Any]) -> None:
    for part in item.get("content") or ():
        if part.get("type") == "output_text":
            part.setdefault("annotations", [])
