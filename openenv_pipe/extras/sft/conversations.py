"""Make episodes of conversations: the token ids that the model would have seen and written.

Prompts are built as when the model plays, and replies are written in the model's own format. So the
model learns what it meets in episodes, and only tokens of the assistant have a loss.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sft.rows import (
    BadRowError,
    Conversation,
    conversation_of,
    first_of,
    is_file,
    is_imitated,
    no_conversation,
    read_rows,
)
from openenv_pipe.extras.sft.schema import ConversationsConfig
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.hub import is_on_this_machine
from openenv_pipe.models.load import load_chat
from openenv_pipe.pipeline.demonstrations import SourceSetup, too_long_to_play
from openenv_pipe.rollout.conversation import written_completion
from openenv_pipe.rollout.history import HISTORIES
from openenv_pipe.types import Episode, Finish, Group, Message, Status, Task, Tool, Turn, TurnRole

NUM_TRIED = 1000  # conversations that `check` measures


async def read_conversations(source: ConversationsConfig, setup: SourceSetup) -> list[Group]:
    """Read all conversations, each as a group of one episode.

    Bad rows are left out, and a note says how many are read, and which are bad. Raises ConfigError.
    """
    chat = setup.rollout.chat
    assert isinstance(chat, ChatFormat)
    return await asyncio.to_thread(_groups, source, chat, setup)


def _groups(source: ConversationsConfig, chat: ChatFormat, setup: SourceSetup) -> list[Group]:
    groups, bad = list[Group](), list[str]()
    for index, turns in enumerate(_rows(source, chat, setup.config.env.max_episode_tokens)):
        if isinstance(turns, str):
            bad.append(turns)
            continue
        task = Task(id=f"data/{index}", split="data", index=index, seed=0)
        episode = Episode(task=task, member=0, seed=0, turns=turns, status=Status.DONE)
        groups.append(Group(id=f"warm start/{index}", task=task, episodes=[episode]))
    if not groups:
        raise no_conversation(source, bad)
    stage = setup.config.trainer.warm_start
    times = stage.steps * stage.episodes_per_step / len(groups)
    num_replies = sum(len(group.episodes[0].agent_turns) for group in groups)
    left_out = f"; {len(bad)} left out{first_of(bad)}" if bad else ""
    setup.notify(
        f"imitating {len(groups)} of {len(groups) + len(bad)} conversations, {num_replies} replies "
        f"in all, each {times:.3g} times{left_out}"
    )
    return groups


def _rows(
    source: ConversationsConfig, chat: ChatFormat, max_tokens: int
) -> Iterator[list[Turn] | str]:
    for where, row in read_rows(source):
        try:
            yield turns_of(conversation_of(row), chat, max_tokens)
        except (BadRowError, ConfigError) as error:  # the template may be unable to render it
            yield f"{where}: {error}"


def try_conversations(config: RunConfig) -> Iterator[Line]:
    """Measure the replies of a file's first conversations, in tokens of a model on this machine.

    Raises ConfigError if none can be used.
    """
    source = config.trainer.warm_start.source
    assert isinstance(source, ConversationsConfig)
    if not (is_file(source) and is_on_this_machine(config.model)):
        return
    rows = _rows(source, load_chat(config.model), config.env.max_episode_tokens)
    found = list(islice(rows, NUM_TRIED))
    bad = [each for each in found if isinstance(each, str)]
    turns = [
        turn
        for each in found
        if not isinstance(each, str)
        for turn in each
        if turn.role is TurnRole.AGENT
    ]
    if not turns:
        raise no_conversation(source, bad)
    if bad:
        text = f"{len(bad)} of {len(found)} conversations are left out{first_of(bad)}"
        yield Line("warm start", Result.WARN, text)
    if text := too_long_to_play(turns, config):
        yield Line("warm start", Result.WARN, text)
    else:
        longest = max(turn.num_completion_tokens for turn in turns)
        text = f"{len(turns)} replies of at most {longest} tokens"
        yield Line("warm start", Result.OK, text)


def turns_of(
    conversation: Conversation, chat: ChatFormat, max_tokens: int, num_first: int | None = None
) -> list[Turn]:
    """Return the turns of a conversation as if the model had played it.

    num_first: messages before the replies to imitate; None: those before the first reply.

    Raises BadRowError: it has more tokens than `max_tokens`, or a reply cannot be written.
    """
    opening, exchanges = _exchanges(conversation.messages, num_first)
    history = HISTORIES[chat.history](chat, opening, conversation.tools)
    turns, shown = list[Turn](), opening
    for reply, following in exchanges:
        if turns:
            history.add(turns[-1], shown)
        text = reply_text(chat, reply, conversation.tools)
        completion = written_completion(chat, text, max_tokens)
        num_tokens = len(history.prompt_ids) + len(completion.token_ids)
        if completion.finish is Finish.LENGTH or num_tokens > max_tokens:
            raise BadRowError(f"longer than env.max_episode_tokens={max_tokens} tokens")
        if chat.ends.ids.intersection(completion.token_ids[:-1]):
            raise BadRowError(f"a reply contains the token that ends a turn: {text!r:.60}")
        turns.append(
            Turn(
                prompt_ids=history.new_ids,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish=completion.finish,
                policy_versions=completion.policy_versions,
                reply=text,
                parent=history.parent,
                role=TurnRole.AGENT if is_imitated(reply) else TurnRole.CONTEXT,
                messages=shown,
            )
        )
        shown = following
    return turns


def _exchanges(
    messages: Sequence[Message], num_first: int | None
) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """Return the messages before the first reply, and each reply with those that follow it."""
    if num_first is None:
        roles = [message["role"] for message in messages]
        num_first = roles.index("assistant") if "assistant" in roles else len(roles)
    opening = [*messages[:num_first]]
    exchanges = list[tuple[Message, list[Message]]]()
    for message in messages[len(opening) :]:
        if message["role"] == "assistant":
            exchanges.append((message, []))
        else:
            exchanges[-1][1].append(message)
    return opening, exchanges


def reply_text(chat: ChatFormat, message: Message, tools: Sequence[Tool]) -> str:
    """Return a message of the assistant as the model writes it.

    Raises BadRowError: the model's format has no place for its calls or its thoughts.
    """
    text = chat.writer.of_message(message, tools)
    if text is None:
        raise BadRowError(
            f"the chat template has no place for the calls or thoughts of {message!r:.80}"
        )
    return text
