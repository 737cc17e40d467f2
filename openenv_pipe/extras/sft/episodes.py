"""Episodes to imitate: recorded ones, and those that the policy or a teacher plays.

Recorded token ids are used as they are if they are of this model's tokenizer. Episodes of other
models are written anew in this model's own format, as conversations are.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from openenv_pipe.engines.openai import ChatClient, OpenAIEngine
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.sft.conversations import turns_of
from openenv_pipe.extras.sft.rows import KEY, BadRowError, Conversation
from openenv_pipe.extras.sft.schema import (
    EpisodesConfig,
    PlayedTasks,
    PolicyConfig,
    SelectedEpisodes,
    TeacherConfig,
)
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.messages import split_tools
from openenv_pipe.models.chat.probes import assistant
from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.pipeline.demonstrations import SourceSetup
from openenv_pipe.rollout import RolloutContext, collect_groups
from openenv_pipe.rollout.history import HISTORIES
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.find import find_folder
from openenv_pipe.types import PREVIOUS, Episode, Finish, Group, Message, Tool, Turn, TurnRole


async def read_recorded(source: EpisodesConfig, setup: SourceSetup) -> list[Group]:
    """Read the recorded episodes that are to be imitated. Raises ConfigError."""
    return await asyncio.to_thread(lambda: _chosen(list(_recorded(source)), source, setup))


def check_recorded(source: EpisodesConfig) -> str:
    """Return how many files of episodes there are. Raises ConfigError if there are none."""
    return f"{len(_files(source))} files of episodes of {source.path}"


def _recorded(source: EpisodesConfig) -> Iterator[Group]:
    """Yield the groups of a run, a folder or a file. Raises ConfigError."""
    try:
        for file in _files(source):
            yield from read_episodes(file)
    except RunFolderError as error:
        raise ConfigError(f"{KEY}.path={source.path!r}: {error}") from error


def _files(source: EpisodesConfig) -> list[Path]:
    """Return the files of episodes, of which there is at least one. Raises ConfigError."""
    found = Path(source.path).expanduser()
    if found.is_file():
        return [found]
    try:
        folder = find_folder(str(found))
    except RunFolderError as error:
        raise ConfigError(f"{KEY}.path={source.path!r}: {error}") from error
    files = sorted((folder / "episodes").glob("*.jsonl.gz")) or sorted(folder.glob("*.jsonl.gz"))
    if not files:
        raise ConfigError(
            f"{KEY}.path={source.path!r}: {folder} has no episodes, files such as "
            "episodes/step_000001.jsonl.gz; name a run that has played, or one such file"
        )
    return files


async def play_teacher(source: TeacherConfig, setup: SourceSetup) -> list[Group]:
    """Let another model play tasks of the train split, and choose what is imitated.

    Raises ConfigError, EngineError and HostError.
    """
    engine = source.engine
    async with ChatClient(engine, block=f"{KEY}.engine", cache_dir=engine.cache_dir) as client:
        rollout = setup.rollout.with_engine(OpenAIEngine(engine, client))
        return await _play(source, setup, rollout)


async def play_policy(source: PolicyConfig, setup: SourceSetup) -> list[Group]:
    """Let the policy play tasks of the train split, and choose what it imitates.

    Raises ConfigError, EngineError and HostError.
    """
    return await _play(source, setup, setup.rollout)


async def _play(source: PlayedTasks, setup: SourceSetup, rollout: RolloutContext) -> list[Group]:
    setup.count.total = source.num_tasks * source.samples_per_task
    groups = await collect_groups(
        rollout,
        setup.order.take(0, source.num_tasks),
        group_size=source.samples_per_task,
        temperature=source.temperature,
        seed=setup.config.seed,
        label=source.type,
        count=setup.count,
    )
    return await asyncio.to_thread(_chosen, groups, source, setup)


def _chosen(groups: Sequence[Group], source: SelectedEpisodes, setup: SourceSetup) -> list[Group]:
    """Return the episodes that are imitated, in the format of this model.

    Raises ConfigError if there are none.
    """
    chat = setup.rollout.chat
    assert isinstance(chat, ChatFormat)
    kept, problems, num_episodes = list[Group](), dict[str, int](), 0
    for group in groups:
        num_episodes += len(group.episodes)
        episodes = [each for each in group.scored if each.success or source.only is None]
        episodes.sort(key=lambda each: -each.reward)
        usable = list[Episode]()
        for episode in episodes[: source.best]:
            try:
                turns = _own_turns(episode, chat, setup.config.env.max_episode_tokens)
                usable.append(replace(episode, turns=turns))
            except BadRowError as error:
                problems[str(error)] = problems.get(str(error), 0) + 1
        if usable:
            kept.append(replace(group, id=f"warm start/{len(kept)}", episodes=usable))
    num_kept = sum(len(group.episodes) for group in kept)
    reasons = "".join(f"\n  {count} left out: {text}" for text, count in problems.items())
    if not kept:
        raise ConfigError(
            f"{KEY}: none of {num_episodes} episodes can be imitated with only="
            f"{source.only or 'null'}{reasons}\nset {KEY}.only=null, or take episodes of a better "
            "policy"
        )
    setup.notify(f"imitating {num_kept} of {num_episodes} episodes{reasons}")
    return kept


def _own_turns(episode: Episode, chat: ChatFormat, max_tokens: int) -> list[Turn]:
    turns = episode.turns
    if not turns:
        raise BadRowError("no turns")
    if _is_in_format(turns, chat):
        if episode.num_branch_tokens > max_tokens:
            raise BadRowError(f"longer than env.max_episode_tokens={max_tokens} tokens")
        return turns
    conversation = _conversation_of(episode)
    num_first = len(split_tools(turns[0].messages)[1])
    new = turns_of(conversation, chat, max_tokens, num_first)
    return [
        replace(one, steps=turn.steps, unusable=turn.unusable)
        for one, turn in zip(new, turns, strict=True)
    ]


def _conversation_of(episode: Episode) -> Conversation:
    """Return the messages of an episode. Raises BadRowError: not recorded, or no conversation."""
    if not all(turn.messages for turn in episode.turns):
        raise BadRowError("the token ids are of another model, and the messages are not recorded")
    found = _new_messages(episode)
    if found is None or any(turn.role is not TurnRole.AGENT for turn in episode.turns):
        raise BadRowError(
            "the token ids are of another model, and its turns are not one conversation, in which "
            "each answers the messages after the turn before"
        )
    tools, messages = list[Tool](), list[Message]()
    for turn, new in zip(episode.turns, found, strict=True):
        listed, shown = split_tools(new)
        tools = listed or tools
        messages += shown
        messages.append(_as_message(turn.reply, tools))
    return Conversation(messages=messages, tools=tools)


def _new_messages(episode: Episode) -> list[list[Message]] | None:
    """Return what each turn shows after the turn before; None if one does not continue it.

    The pipeline's loop records just that, also where the template renders prompts anew: then the
    first turn, too, has an explicit parent, None. A program's turn has the messages after its
    parent, or all of them.
    """
    turns = episode.turns
    if turns[0].parent is None or all(turn.parent == PREVIOUS for turn in turns):
        return [turn.messages for turn in turns]
    found, wholes = list[list[Message]](), list[list[Message]]()
    for turn, parent in zip(turns, episode.parents, strict=True):
        whole = [*turn.messages]
        if parent is not None and parent >= len(wholes):  # calls that were made at once
            return None
        if parent is not None:
            whole = [*wholes[parent], assistant(turns[parent].reply), *whole]
        before = [*map(_seen, wholes[-1]), "assistant"] if wholes else []
        if [*map(_seen, whole)][: len(before)] != before:
            return None
        found.append(whole[len(before) :])
        wholes.append(whole)
    return found


def _seen(message: Message) -> Message | str:
    """Return what tells messages apart; a template may show the model's own in another form."""
    return "assistant" if message["role"] == "assistant" else message


def _is_in_format(turns: Sequence[Turn], chat: ChatFormat) -> bool:
    """Return whether the token ids are of this model's tokenizer and chat template.

    The first prompt has to be what the template renders of its messages. Where they are not
    recorded, the ids have to be in the vocabulary, and replies to end as those of this model.
    """
    if any(turn.usage is not None for turn in turns):
        return False
    if any(chat.reply_text(turn.completion_ids) != turn.reply for turn in turns):
        return False
    if turns[0].messages:
        tools, opening = split_tools(turns[0].messages)
        history = HISTORIES[chat.history](chat, opening, tools)
        return list(history.prompt_ids) == list(turns[0].prompt_ids)
    vocabulary_size = len(chat.tokenizer)
    return all(
        max(turn.prompt_ids + turn.completion_ids, default=0) < vocabulary_size
        and (turn.finish is not Finish.STOP or {*turn.completion_ids[-1:]} <= chat.ends.ids)
        for turn in turns
    )


def _as_message(reply: str, tools: Sequence[Tool]) -> Message:
    """Return a reply of another model with its calls in a field."""
    read = PLAIN_READER.read(reply, tools)
    if not read.made_calls:
        return {"role": "assistant", "content": reply}
    calls = [
        {"type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
        for each in read.made_calls
    ]
    return {"role": "assistant", "content": read.content, "tool_calls": calls}
