"""The dialects of OpenEnv's proxy, of which those of OpenAI are changed."""

from typing import Any

from openenv_pipe.extras.agents.http.capture import (
    APIType,
    OpenAIChatTransformer,
    TransformManager,
    UpstreamRequestError,
)
from openenv_pipe.extras.agents.http.request_fields import (
    IGNORED,
    find_ignored,
    require_conversation,
)
from openenv_pipe.extras.agents.http.responses_dialect import ResponsesTransformer


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
    """Finds the dialect of a request."""

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
            ignored = find_ignored(self._dialect, body)
            require_conversation(self._dialect, body)
            return {**self._transformer.transform_request(body), IGNORED: ignored}
        except UpstreamRequestError:
            raise
        except ValueError as error:
            raise UpstreamRequestError(str(error)) from error
        except (TypeError, AttributeError, LookupError) as error:
            # A type that `check_shape` does not know, in what the proxy translates.
            name = self._dialect.value
            text = f"the request has not the form of {name}: {type(error).__name__}: {error}"
            raise UpstreamRequestError(text) from error
