"""Chat messages to token ids and back, append-only.

What was sampled is never rendered again. Later turns only add: the ids between the model's last
token and its next one are taken from the chat template, markup and all, so that a conversation
grown turn by turn has exactly the ids of the template applied to the whole.
"""

from collections.abc import Sequence
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Message

_OPENING: tuple[Message, ...] = ({"role": "user", "content": "question"},)
_REPLY = "answer"
_PROBES = (_REPLY, "<think>\nwhy\n</think>\n\nanswer")


class ChatFormat:
    """The chat template of one tokenizer.

    Raises ConfigError at construction if the template rewrites earlier turns when the
    conversation goes on: its token ids would then not be those that were sampled.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template; set model.chat_template to a Jinja template"
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.end_id: int = tokenizer.eos_token_id
        self._end_text: str = tokenizer.eos_token
        self._special_tokens: list[str] = tokenizer.all_special_tokens
        self._after_reply = self._render((*_OPENING, _assistant(_REPLY)), prompt=False)
        self._check_ends_turns()
        for reply in _PROBES:
            self._check_append_only(reply)

    def first_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation's beginning, up to where the model writes."""
        return self._encode(self._render(self._without_markup(messages), prompt=True))

    def following_ids(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids between a completion and the next one.

        `ended` says whether the completion has its end-of-turn token; a reply that was cut off
        lacks it, and gets it here, as a token that the model did not choose.
        """
        conversation = (*_OPENING, _assistant(_REPLY), *self._without_markup(messages))
        text = self._render(conversation, prompt=True)
        turn_end = self._after_reply.rindex(self._end_text) + len(self._end_text)
        following = text[turn_end:]
        return self._encode(following if ended else self._end_text + following)

    def reply_text(self, completion_ids: Sequence[int]) -> str:
        """What the model wrote, without its end-of-turn token."""
        ended = bool(completion_ids) and completion_ids[-1] == self.end_id
        ids = completion_ids[:-1] if ended else completion_ids
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def reply_ids(self, reply: str) -> list[int]:
        """Ids of a reply that was not sampled (a scripted one), with its end-of-turn token."""
        return [*self._encode(reply), self.end_id]

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )

    def _without_markup(self, messages: Sequence[Message]) -> list[Message]:
        """Breaks up special tokens in what an environment says: it must not forge turns."""
        return [{**message, "content": self._harmless(message["content"])} for message in messages]

    def _harmless(self, text: str) -> str:
        for token in self._special_tokens:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _check_ends_turns(self) -> None:
        if self._end_text not in self._after_reply.rpartition(_REPLY)[2]:
            raise ConfigError(
                f"the chat template does not end the model's turn with the tokenizer's "
                f"end token {self._end_text!r}; set model.chat_template to one that does"
            )

    def _check_append_only(self, reply: str) -> None:
        conversation: list[Message] = [*_OPENING]
        grown = self.first_ids(conversation)
        for question in ("second", "third"):
            message = {"role": "user", "content": question}
            grown += self.reply_ids(reply) + self.following_ids([message], ended=True)
            conversation += [_assistant(reply), message]
        if grown != self.first_ids(conversation):
            raise ConfigError(
                "the chat template rewrites earlier turns when the conversation goes on "
                f"(seen with the reply {reply!r}), so trained tokens would not be the sampled "
                "ones; set model.chat_template to one that keeps them, as in "
                "conf/model/qwen3_0_6b.yaml"
            )


def _assistant(reply: str) -> Message:
    return {"role": "assistant", "content": reply}
