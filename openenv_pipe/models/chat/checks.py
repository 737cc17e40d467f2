"""What a chat template can do: whether it only appends, and whether it shows tools."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.probes import (
    CALL,
    CALL_IN_FIELD,
    OPENING,
    REPLIES,
    RESULT,
    TOOL,
    assistant,
    user,
)
from openenv_pipe.models.chat.rendering import RejectedMessagesError
from openenv_pipe.types import Message, Tool

if TYPE_CHECKING:
    from openenv_pipe.models.chat.chat_template import ChatFormat

HistoryMode = Literal["append", "rerender"]
HistoryChoice = Literal["auto", "append", "rerender"]


def choose_history(chat: "ChatFormat", wanted: HistoryChoice) -> HistoryMode:
    """Return whether prompts are appended to or rendered anew.

    Raises ConfigError: `append` is wanted, and the template rewrites earlier turns.
    """
    if wanted == "rerender":
        return "rerender"
    for reply in REPLIES:
        if _only_grows(chat, reply, [[user("second")], [user("third")]]):
            continue
        if wanted == "auto":
            return "rerender"
        raise ConfigError(
            "the chat template rewrites earlier turns when the conversation goes on "
            f"(seen with the reply {reply!r}), so trained tokens would not be the sampled "
            "ones; set model.history=rerender, which begins a sample where the template "
            "changes something, or model.chat_template to one that keeps earlier turns, as "
            "in conf/model/qwen3_0_6b.yaml"
        )
    return "append"


def template_takes_tools(chat: "ChatFormat", call: Message) -> bool:
    """Return whether the template shows tools, calls and results, and keeps them in place."""
    try:
        begun = chat.renderer.render(OPENING, prompt=True, tools=[TOOL])
        shown = chat.renderer.render((*OPENING, call, RESULT), prompt=True, tools=[TOOL])
        return (
            TOOL["function"]["name"] in begun
            and call["content"] in shown
            and RESULT["content"] in shown.partition("sky")[2]
            and (
                chat.history == "rerender"
                or _only_grows(chat, CALL, [[RESULT, RESULT], [user("second")]], [TOOL])
            )
        )
    except RejectedMessagesError:  # The template does not know a role.
        return False


def text_shows_calls(chat: "ChatFormat") -> bool:
    """Return whether a reply's text shows a call as the template shows one that is in a field.

    Some templates write thoughts and space around calls by themselves.
    """
    begun = chat.renderer.render(OPENING, prompt=True, tools=[TOOL])
    try:
        whole = chat.renderer.render((*OPENING, CALL_IN_FIELD), prompt=False, tools=[TOOL])
        native = whole.removeprefix(begun)
        if chat.ends.text:
            native = native.rpartition(chat.ends.text)[0] or native
        in_text, in_field = (
            chat.renderer.render((*OPENING, call, RESULT), prompt=True, tools=[TOOL])
            for call in (assistant(native), CALL_IN_FIELD)
        )
    except RejectedMessagesError:  # The template does not accept a call without a result.
        return True
    return whole.startswith(begun) and in_text == in_field


def _only_grows(
    chat: "ChatFormat", reply: str, answers: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
) -> bool:
    """Return whether a conversation built answer by answer has the ids of the whole."""
    conversation: list[Message] = [*OPENING]
    grown = chat.first_ids(conversation, tools)
    for messages in answers:
        end = chat.ends.by_role.get(messages[0]["role"], chat.ends.usual)
        grown += [*chat.encode(reply), end]
        grown += chat.following_ids(messages, end=end)
        conversation += [assistant(reply), *messages]
    replies = [index for index, each in enumerate(conversation) if each["role"] == "assistant"]
    return grown == chat.rendered_ids(conversation, tools, dict.fromkeys(replies))
