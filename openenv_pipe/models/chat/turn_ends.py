"""Which tokens end the model's turn.

Models have several. The template writes one after each reply; the model's `generation_config.json`
may list others: `<|eom_id|>` of Llama 3 and `<|call|>` of gpt-oss end a turn that calls a tool,
`<|endoftext|>` of Qwen ends everything. Models such as GLM write nothing after a reply: they end it
with the first token of the next message, which names that message's author.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.probes import OPENING, REPLY, RESULT, TOOL, assistant, user
from openenv_pipe.models.chat.rendering import RejectedMessagesError, TemplateRenderer
from openenv_pipe.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnds:
    """The tokens at which the model's turn ends: the engines stop at any of them."""

    ids: frozenset[int]
    text: str  # that the template writes after a reply; empty: the next message begins with it
    # Of replies that were not sampled, by the role of the message that follows.
    by_role: Mapping[str, int]

    @property
    def usual(self) -> int:
        """The end of a reply that the user answers."""
        return self.by_role["user"]

    def of_reply(self, *, has_calls: bool) -> int:
        """Return the end of a reply that was not sampled."""
        return self.by_role.get("tool", self.usual) if has_calls else self.usual


def find_turn_ends(
    tokenizer: Any,
    renderer: TemplateRenderer,
    special_tokens: Sequence[str],
    eos_ids: Iterable[int],
) -> TurnEnds:
    """Find the ends in a template and a model's settings.

    special_tokens: of the tokenizer, by their texts
    eos_ids: the end tokens that the model's settings list

    Raises ConfigError: nothing ends the model's turn.
    """
    listed = frozenset(eos_ids)
    text = _written_end(tokenizer, renderer, special_tokens)
    if text:
        end_id: int = tokenizer.convert_tokens_to_ids(text)
        by_role = MappingProxyType({"user": end_id})
        return TurnEnds(ids=listed | {end_id}, text=text, by_role=by_role)
    ends = {
        token: each
        for token in special_tokens
        if (each := tokenizer.convert_tokens_to_ids(token)) in listed
    }
    found: dict[str, int] = {}
    for following in (user("second"), RESULT):
        after = _after_reply(renderer, following)
        if begins := [each for token, each in ends.items() if after.startswith(token)]:
            found[following["role"]] = begins[0]
    if "user" not in found:
        raise ConfigError(
            f"the chat template does not end the model's turn with the tokenizer's end token "
            f"{tokenizer.eos_token!r}, nor with another special token, and the next message begins "
            "with no end token of generation_config.json; set model.chat_template to one that "
            "ends turns"
        )
    return TurnEnds(ids=listed, text="", by_role=MappingProxyType(found))


def _written_end(tokenizer: Any, renderer: TemplateRenderer, special_tokens: Sequence[str]) -> str:
    """Return the token that the template writes after the model's turn; empty if there is none.

    Some tokenizers have another token for the end of a text, as those of Gemma do, which the
    template may write after the last turn, as that of Phi 3 does.
    """
    after = renderer.render((*OPENING, assistant(REPLY)), prompt=False).rpartition(REPLY)[2]
    ends = [each for each in {tokenizer.eos_token, *special_tokens} if each in after]
    return min(ends, key=lambda each: (after.index(each), -len(each)), default="")


def _after_reply(renderer: TemplateRenderer, following: Message) -> str:
    """Return what the template writes after a reply; empty if it does not know the role."""
    try:
        text = renderer.render((*OPENING, assistant(REPLY), following), prompt=True, tools=[TOOL])
    except RejectedMessagesError:
        return ""
    return text.rpartition(REPLY)[2].lstrip("\n")
