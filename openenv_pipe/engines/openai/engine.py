"""The engine: episodes as conversations with one endpoint. It samples, and says no ids."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.engines.base import Completion, Request, turn_seed
from openenv_pipe.engines.openai.client import ChatClient
from openenv_pipe.engines.openai.conversation import Conversation, read_reply
from openenv_pipe.engines.openai.text_chat import pack, unpack
from openenv_pipe.types import Finish

VERSION = 0


class OpenAIEngine:
    """Completions have logprob 0: nothing may train on them.

    `client` is entered and left by whoever builds the engine.
    """

    capabilities = OpenAIEngineConfig.capabilities

    def __init__(self, config: OpenAIEngineConfig, client: ChatClient) -> None:
        self._config = config
        self._client = client
        self._conversations: dict[int, Conversation] = {}
        self.max_episodes = config.max_concurrent

    def expect(self, num_episodes: int, limit: int) -> int:
        self._conversations.clear()
        return 0

    async def generate(self, request: Request) -> Completion:
        conversation = self._conversations.setdefault(request.episode, Conversation())
        conversation.hear(unpack(request.new_ids))
        num_prompt_tokens = len(pack({"messages": conversation.messages}))
        answer = await self._client.complete(
            self._body(conversation, request), num_prompt_tokens + request.max_tokens
        )
        choice = answer["choices"][0]
        reply = read_reply(choice["message"])
        conversation.say(reply)
        token_ids = pack(reply)
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish=Finish.LENGTH if choice.get("finish_reason") == "length" else Finish.STOP,
            policy_versions=[VERSION],
        )

    def _body(self, conversation: Conversation, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(conversation.messages),
            "temperature": request.temperature,
            "seed": turn_seed(request.seed, request.turn) >> 32,  # below 2**31: any endpoint's
            self._config.max_tokens_key: request.max_tokens,
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        body |= self._config.parameters
        return {key: value for key, value in body.items() if value is not None}

    def finish(self, episode: int) -> None:
        self._conversations.pop(episode, None)

    async def begin_update(self, *, idle: bool) -> None:
        """An endpoint's memory is elsewhere."""

    async def publish(self, version: int) -> None:
        """An endpoint does not learn from us."""

    async def metrics(self) -> Mapping[str, float]:
        """Nothing is measured."""
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        """The configuration says it all."""
        return {}
