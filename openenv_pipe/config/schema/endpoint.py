"""Base of the blocks that describe an endpoint: a hosted model, or a server of your own."""

from typing import Any, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    HeaderValue,
    NumRetries,
    PositiveCount,
    Seconds,
    ServerUrl,
)


class EndpointBlock(Block):
    """An OpenAI-compatible chat completions endpoint."""

    base_url: ServerUrl = Field(description="the URL in front of /chat/completions")
    model: str = Field(description="the model's name at the endpoint")
    api_key: HeaderValue | None = Field(description="sent as a bearer token; null: none is sent")
    max_concurrent: PositiveCount = Field(description="requests in flight at once")
    requests_per_minute: PositiveCount | None = Field(
        description="the client's own limit on requests per minute; null: none"
    )
    tokens_per_minute: PositiveCount | None = Field(
        description="the client's own limit on tokens per minute, estimated as those of the prompt "
        "and of the longest possible reply; null: none"
    )
    max_tokens_key: Literal["max_completion_tokens", "max_tokens"] = Field(
        description="the request's field that bounds a reply; older servers know only max_tokens"
    )
    parameters: dict[str, Any] = Field(
        description="further fields of each request, which replace ours; null removes a field"
    )
    timeout_s: Seconds = Field(description="time limit of one request")
    max_retries: NumRetries = Field(
        description="how often a failed or rejected request is repeated"
    )
