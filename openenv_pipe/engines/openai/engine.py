"""The engine `openai`: each episode is a conversation with a hosted model, without token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.engines.base import (
    MessageRequest,
    RelayedReply,
    RelayedRequest,
    StaticEngine,
    TextReply,
    estimate_tokens,
    turn_seed,
)
from openenv_pipe.engines.openai.client import ChatClient, num_reported_tokens
from openenv_pipe.engines.openai.conversation import (
    Conversation,
    read_reply,
    reply_text,
)
from openenv_pipe.system.foreign_json import encodable_json
from openenv_pipe.types import Finish


class OpenAIEngine(StaticEngine):
    """An `engines.base.Engine`. The caller opens and closes `client`."""

    def __init__(self, config: OpenAIEngineConfig, client: ChatClient) -> None:
        self.capabilities = replace(config.capabilities, sees_pictures=config.pictures)
        self._config = config
        self._client = client
        self._conversations: dict[int, Conversation] = {}
        self.max_episodes = config.max_concurrent

    def begin_collection(self, num_episodes: int, limit: int) -> int:
        self._conversations.clear()
        return 0

    async def generate(self, request: MessageRequest) -> TextReply:
        """Send the whole conversation and return the endpoint's reply.

        Raises:
            ConfigError: the endpoint refuses the request.
            EngineError: there was no answer in `max_retries` further tries.
        """
        conversation = self._conversations.setdefault(request.episode, Conversation())
        conversation.add_messages(request.new_messages)
        num_tokens = conversation.num_tokens + request.max_tokens
        answer = await self._client.complete(self._body(conversation.messages, request), num_tokens)
        reply = read_reply(answer["choices"][0]["message"])
        conversation.add_reply(reply)
        return TextReply(**_fields(reply, answer))

    async def relay(self, request: RelayedRequest) -> RelayedReply:
        """Answer as `RelayingEngine` says."""
        messages = encodable_json(request.messages)
        num_tokens = estimate_tokens([*messages, *request.tools]) + request.max_tokens
        answer = await self._client.complete(self._body(messages, request), num_tokens)
        reply = read_reply(answer["choices"][0]["message"])
        return RelayedReply(message=reply, **_fields(reply, answer))

    def _body(
        self, messages: Sequence[Mapping[str, Any]], request: MessageRequest | RelayedRequest
    ) -> dict[str, Any]:
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
        return {key: value for key, value in body.items() if value is not None}

    def end_episode(self, episode: int) -> None:
        self._conversations.pop(episode, None)


def _fields(reply: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a TextReply."""
    is_cut = answer["choices"][0].get("finish_reason") == "length"
    return {
        "text": reply_text(reply),
        "finish": Finish.LENGTH if is_cut else Finish.STOP,
        "num_prompt_tokens": num_reported_tokens(answer, "prompt_tokens"),
        "num_completion_tokens": num_reported_tokens(answer, "completion_tokens"),
    }
