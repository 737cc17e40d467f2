"""The engine `openai`: each episode is a conversation with a hosted model, without token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.engines.base import (
    MessageRequest,
    RelayedRequest,
    StaticEngine,
    TextReply,
    estimate_tokens,
    turn_seed,
)
from openenv_pipe.engines.openai.client import ChatClient, num_reported_tokens
from openenv_pipe.engines.openai.messages import endpoint_messages, read_reply, reply_text
from openenv_pipe.system.untrusted_json import encodable_json
from openenv_pipe.types import Finish

# The finish reasons of replies that are not whole.
CUT = {"length": Finish.LENGTH, "content_filter": Finish.FILTERED}


class OpenAIEngine(StaticEngine):
    """An `engines.base.Engine`. The caller opens and closes `client`."""

    def __init__(self, config: OpenAIEngineConfig, client: ChatClient) -> None:
        self.capabilities = replace(config.capabilities, sees_images=config.images)
        self._config = config
        self._client = client
        self.max_episodes = config.max_concurrent

    async def generate(self, request: MessageRequest) -> TextReply:
        """Send the whole conversation and return the endpoint's reply.

        Raises:
            ConfigError: the endpoint rejects the request.
            EngineError: there was no answer in `max_retries` further tries.
        """
        num_tokens = estimate_tokens(request.messages)
        return await self._complete(endpoint_messages(request.messages), num_tokens, request)

    async def relay(self, request: RelayedRequest) -> TextReply:
        """Answer as `RelayingEngine` says."""
        messages = encodable_json(request.messages)
        num_tokens = estimate_tokens([*messages, *request.tools])
        return await self._complete(messages, num_tokens, request)

    async def _complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        num_tokens: int,
        request: MessageRequest | RelayedRequest,
    ) -> TextReply:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": request.temperature,
            "seed": turn_seed(request.seed, request.turn) >> 32,  # below 2**31, for all endpoints
            self._config.max_tokens_key: request.max_tokens,
        }
        if request.tools:
            body["tools"] = encodable_json(request.tools)
        body |= self._config.parameters
        body = {key: value for key, value in body.items() if value is not None}
        answer = await self._client.complete(body, num_tokens + request.max_tokens)
        message = read_reply(answer["choices"][0]["message"])
        return TextReply(
            text=reply_text(message),
            message=message,
            finish=CUT.get(answer["choices"][0].get("finish_reason"), Finish.STOP),
            num_prompt_tokens=num_reported_tokens(answer, "prompt_tokens"),
            num_completion_tokens=num_reported_tokens(answer, "completion_tokens"),
        )
