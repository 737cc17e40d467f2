"""The engine's side of one episode: the requests that it gets and the turns that it returns.

There is one class for each kind of engine; `engines.base` has their requests and answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from openenv_pipe.engines.base import (
    Completion,
    GenerationRequest,
    MessageRequest,
    ObservationRequest,
    TextReply,
    TokenRequest,
    cut_text,
    estimate_tokens,
)
from openenv_pipe.models.chat.messages import with_tools
from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.rollout.context import Chat, EpisodeSpec, PlayContext
from openenv_pipe.rollout.history import HISTORIES, PromptHistory
from openenv_pipe.system.untrusted_json import encodable
from openenv_pipe.types import Finish, Image, Message, Observation, Opening, Turn, Usage

UNTRAINED_VERSION = 0  # the policy version of replies that no trained policy gives


class Conversation(ABC):
    reader = PLAIN_READER  # of the replies

    def __init__(
        self, context: PlayContext, spec: EpisodeSpec, opening: Opening, first: Observation
    ) -> None:
        """first: the observation of the reset."""
        self._context = context
        self._spec = spec
        self._opening = opening
        self._observations = [first]
        self._num_turns = 0  # before the present one

    @property
    @abstractmethod
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the next turn's whole prompt."""

    @property
    @abstractmethod
    def _sees_images(self) -> bool:
        """Whether the model is given images, not only their notes."""

    @abstractmethod
    def num_tool_tokens(self) -> int:
        """Return how many tokens of the opening describe tools."""

    def add(self, messages: Sequence[Message], observations: Sequence[Observation]) -> None:
        """Add what follows the last turn: its steps' observations, and the adapter's messages."""
        self._num_turns += 1
        self._observations += observations
        self._add(messages)

    @abstractmethod
    def _add(self, messages: Sequence[Message]) -> None:
        """Extend the prompt by the last turn and these messages."""

    @abstractmethod
    async def reply(self, max_tokens: int) -> Turn:
        """Ask the engine for the next reply. Raises EngineError and ConfigError."""

    def _fitted(self, messages: Sequence[Message], cut: Callable[[str, int], str]) -> list[Message]:
        """Cut long messages, and keep images whose notes are left, if the model sees images.

        cut: shortens a text to a number of tokens.
        """
        limit = self._context.env.max_observation_tokens
        return [
            with_images_shown(each, self._sees_images)
            for each in cut_messages(messages, limit, cut)
        ]

    def _fields(self, max_tokens: int) -> dict[str, Any]:
        return {
            "episode": self._spec.number,
            "turn": self._num_turns,
            "max_tokens": max_tokens,
            "temperature": self._spec.temperature,
            "seed": self._spec.seed,
        }

    def _observation_request(self, max_tokens: int) -> ObservationRequest:
        return ObservationRequest(
            observations=[*self._observations], opening=self._opening, **self._fields(max_tokens)
        )


class TokenConversation(Conversation):
    _last: Turn

    def __init__(
        self, context: PlayContext, spec: EpisodeSpec, opening: Opening, first: Observation
    ) -> None:
        super().__init__(context, spec, opening, first)
        assert context.chat is not None
        self._chat = context.chat
        self.reader = self._chat.reply_reader
        self._num_sampled = 0  # tokens of completions
        messages, tools = self._cut(opening.messages), opening.tools
        self._new_messages = with_tools(messages, tools)
        self._images = _images_of(messages)
        kind = HISTORIES[self._chat.history]
        self._history: PromptHistory = kind(self._chat, messages, tools)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._history.prompt_ids)

    @property
    def _sees_images(self) -> bool:
        return self._chat.sees_images

    def num_tool_tokens(self) -> int:
        opening = self._opening
        with_tools = self._chat.first_ids(opening.messages, opening.tools)
        return len(with_tools) - len(self._chat.first_ids(opening.messages))

    def _add(self, messages: Sequence[Message]) -> None:
        self._new_messages = self._cut(messages)
        # Not in place, because requests have the earlier ones.
        self._images = {**self._images, **_images_of(self._new_messages)}
        self._history.add(self._last, self._new_messages)

    async def reply(self, max_tokens: int) -> Turn:
        completion = await self._complete(max_tokens)
        self._num_sampled += len(completion.token_ids)
        self._last = Turn(
            prompt_ids=self._history.new_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            policy_versions=completion.policy_versions,
            reply=self._chat.reply_text(completion.token_ids),
            parent=self._history.parent,
            messages=self._new_messages,
        )
        return self._last

    def _cut(self, messages: Sequence[Message]) -> list[Message]:
        return self._fitted(messages, self._chat.cut)

    async def _complete(self, max_tokens: int) -> Completion:
        return await self._context.engine.generate(
            TokenRequest(
                prompt_ids=self._history.prompt_ids,
                num_sampled=self._num_sampled,
                group_seed=self._spec.group_seed,
                member=self._spec.member,
                images=self._images,
                **self._fields(max_tokens),
            )
        )


class ScriptedConversation(TokenConversation):
    """A conversation with a scripted policy, whose replies are turned into token ids.

    Their logprobs are 0, because they were not sampled: only a warm start can learn from them.
    """

    async def _complete(self, max_tokens: int) -> Completion:
        request = self._observation_request(max_tokens)
        reply: TextReply = await self._context.engine.generate(request)
        text = self._chat.writer.own_text(reply.text, self._opening.tools)
        return written_completion(self._chat, text, max_tokens)


def written_completion(chat: Chat, text: str, max_tokens: int) -> Completion:
    """Turn a reply that no policy has sampled into a completion, with logprobs of 0."""
    token_ids = chat.reply_ids(text)
    return Completion(
        token_ids=token_ids[:max_tokens],
        logprobs=[0.0] * len(token_ids[:max_tokens]),
        finish=Finish.LENGTH if len(token_ids) > max_tokens else Finish.STOP,
        policy_versions=[UNTRAINED_VERSION],
    )


class MessageConversation(Conversation):
    """A conversation with an engine that takes messages; it has token counts but no token ids."""

    def __init__(
        self, context: PlayContext, spec: EpisodeSpec, opening: Opening, first: Observation
    ) -> None:
        super().__init__(context, spec, opening, first)
        self._num_tokens = 0  # of all turns
        self._messages = self._cut(opening.messages)
        self._new_messages = with_tools(self._messages, opening.tools)
        self._num_new_tokens = estimate_tokens(self._messages) + self.num_tool_tokens()

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_tokens + self._num_new_tokens

    @property
    def _sees_images(self) -> bool:
        return self._context.engine.capabilities.sees_images

    def num_tool_tokens(self) -> int:
        return estimate_tokens(self._opening.tools) if self._opening.tools else 0

    def _add(self, messages: Sequence[Message]) -> None:
        self._new_messages = self._cut(messages)
        self._messages = [*self._messages, self._reply.assistant_message, *self._new_messages]
        self._num_new_tokens = estimate_tokens(self._new_messages)

    def _cut(self, messages: Sequence[Message]) -> list[Message]:
        return self._fitted(messages, cut_text)

    async def reply(self, max_tokens: int) -> Turn:
        reply: TextReply = await self._context.engine.generate(self._request(max_tokens))
        self._reply = reply
        usage = self._usage(reply, max_tokens)
        self._num_tokens += usage.num_prompt_tokens + usage.num_completion_tokens
        return Turn(
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            finish=reply.finish,
            policy_versions=[UNTRAINED_VERSION],
            reply=encodable(reply.text),
            messages=self._new_messages,
            usage=usage,
        )

    def _request(self, max_tokens: int) -> GenerationRequest:
        return MessageRequest(
            messages=self._messages, tools=self._opening.tools, **self._fields(max_tokens)
        )

    def _usage(self, reply: TextReply, max_tokens: int) -> Usage:
        """Return numbers of tokens as the engine reports them, else estimates.

        Prompt tokens are those that earlier turns have not counted, at least 0: reasoning counts in
        the reply but is not part of later prompts, which may therefore be shorter.
        """
        num_prompt = self._num_new_tokens
        if reply.num_prompt_tokens is not None:
            num_prompt = max(0, reply.num_prompt_tokens - self._num_tokens)
        num_completion = reply.num_completion_tokens
        if num_completion is None:
            num_completion = min(max_tokens, estimate_tokens([{"content": reply.text}]))
        return Usage(num_prompt_tokens=num_prompt, num_completion_tokens=num_completion)


class UntokenizedConversation(MessageConversation):
    """A conversation with an engine that takes observations, where no model will learn from it."""

    def _request(self, max_tokens: int) -> GenerationRequest:
        return self._observation_request(max_tokens)


def cut_messages(
    messages: Sequence[Message], limit: int | None, cut: Callable[[str, int], str]
) -> list[Message]:
    """Cut the environment's messages to env.max_observation_tokens each, but no system message.

    limit: in tokens; None: no limit. cut: shortens a text to a number of tokens.
    """
    return [
        message
        if limit is None or message["role"] == "system"
        else {**message, "content": cut(message["content"], limit)}
        for message in messages
    ]


def with_images_shown(message: Message, sees_images: bool) -> Message:
    """Return the message with those images that its text has notes of, or with none."""
    if "images" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "images"}
    text, images = message["content"], message["images"]
    shown = {note: images[note] for note in images if sees_images and note in text}
    return {**rest, "images": shown} if shown else rest


def _images_of(messages: Sequence[Message]) -> dict[int, Image]:
    """Return the images of messages by the token ids that stand for them."""
    return {
        image.token_id: image
        for message in messages
        for image in message.get("images", {}).values()
    }


def conversation_class(context: PlayContext) -> type[Conversation]:
    takes = context.engine.capabilities.takes
    if takes == "messages":
        return MessageConversation
    if takes == "token_ids":
        return TokenConversation
    return UntokenizedConversation if context.chat is None else ScriptedConversation
