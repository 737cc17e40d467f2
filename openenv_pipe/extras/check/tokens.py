"""Measure first messages in the model's tokens against the limits of an episode."""

from collections.abc import Sequence

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import EnvConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.hub import is_on_this_machine
from openenv_pipe.models.load import load_chat as load_chat_format
from openenv_pipe.rollout.conversation import cut_messages
from openenv_pipe.types import Opening


def load_chat(config: RunConfig) -> ChatFormat | None:
    """Load the chat format; None without a tokenizer on this machine that can be trained with."""
    if not config.engine.capabilities.needs_tokenizer:
        return None
    try:
        return load_chat_format(config.model) if is_on_this_machine(config.model) else None
    except ConfigError:  # The requirement `chat` reports it.
        return None


def tokens_line(env: EnvConfig, chat: ChatFormat, openings: Sequence[Opening]) -> Line:
    """Compare the first messages with env.max_episode_tokens, as training will see them."""
    counts = [_count(env, chat, opening) for opening in openings]
    shortest, longest = min(counts), max(counts)
    limit = env.max_episode_tokens
    text = f"first messages have {_range(shortest, longest)} tokens; env.max_episode_tokens={limit}"
    measured = {"shortest": shortest, "longest": longest}
    room = limit - longest
    if room >= env.max_reply_tokens:
        return Line("tokens", Result.OK, f"{text} leaves {room} for what follows", measured)
    tools = _about_tools(env, chat, openings[counts.index(longest)])
    advice = "raise it, as far as the model goes, or cut observations by env.max_observation_tokens"
    if shortest >= limit:
        text = f"{text} leaves no room for a reply{tools}; {advice}"
        return Line("tokens", Result.FAIL, text, measured)
    text = (
        f"{text} leaves {max(0, room)} for a reply, which may have "
        f"env.max_reply_tokens={env.max_reply_tokens}{tools}; {advice}"
    )
    return Line("tokens", Result.WARN, text, measured)


def _count(env: EnvConfig, chat: ChatFormat, opening: Opening, *, with_tools: bool = True) -> int:
    messages = cut_messages(opening.messages, env.max_observation_tokens, chat.cut)
    return len(chat.first_ids(messages, opening.tools if with_tools else ()))


def _about_tools(env: EnvConfig, chat: ChatFormat, opening: Opening) -> str:
    if not opening.tools:
        return ""
    num_tokens = _count(env, chat, opening) - _count(env, chat, opening, with_tools=False)
    return f" ({num_tokens} of them describe {len(opening.tools)} tools)"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
