"""Episodes to imitate: recorded ones, and those that a teacher plays.

Recorded token ids are used as they are if they are of this model's tokenizer. Episodes of other
models are written anew in this model's own format, as conversations are.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from openenv_pipe.engines.openai import ChatClient, OpenAIEngine
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.sft.conversations import turns_of
from openenv_pipe.extras.sft.rows import KEY, BadRowError, Conversation
from openenv_pipe.extras.sft.schema import EpisodesConfig, SelectedEpisodes, TeacherConfig
from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.models.reply_reader import PLAIN_READER
from openenv_pipe.pipeline.demonstrations import SourceSetup
from openenv_pipe.rollout import collect_groups
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.find import find_folder
from openenv_pipe.types import Episode, Group, Message, Tool, Turn


async def read_recorded(source: EpisodesConfig, setup: SourceSetup) -> list[Group]:
    """Read the recorded episodes that are to be imitated.

    Raises:
        ConfigError: there are none, or none can be used.
    """
    return await asyncio.to_thread(lambda: _chosen(list(_recorded(source)), source, setup))


def _recorded(source: EpisodesConfig) -> Iterator[Group]:
    """Yield the groups of a run, a folder or a file. Raises ConfigError."""
    try:
        found = Path(source.path)
        files = [found] if found.is_file() else []
        if not files:
            folder = find_folder(source.path)
            files = sorted((folder / "episodes").glob("*.jsonl.gz"))
            files = files or sorted(folder.glob("*.jsonl.gz"))
        for file in files:
            yield from read_episodes(file)
    except RunFolderError as error:
        raise ConfigError(f"{KEY}.path={source.path!r}: {error}") from error


async def play_teacher(source: TeacherConfig, setup: SourceSetup) -> list[Group]:
    """Let another model play tasks of the train split, and choose what is imitated.

    Raises:
        ConfigError: no episode is chosen.
        EngineError, HostError: the teacher cannot play.
    """
    async with ChatClient(source.engine, cache_dir=source.engine.cache_dir) as client:
        groups = await collect_groups(
            setup.rollout.with_engine(OpenAIEngine(source.engine, client)),
            setup.order.take(0, source.num_tasks),
            group_size=source.samples_per_task,
            temperature=source.temperature,
            seed=setup.config.seed,
            label="teacher",
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
    reasons = "".join(f"\n  {count} of them: {text}" for text, count in problems.items())
    if not kept:
        raise ConfigError(
            f"{KEY}: none of {num_episodes} episodes can be imitated with only="
            f"{source.only or 'null'}{reasons}\nset {KEY}.only=null, or take episodes of a better "
            "policy"
        )
    setup.notify(f"imitating {num_kept} of {num_episodes} episodes{reasons}")
    return kept


def _own_turns(episode: Episode, chat: ChatFormat, max_tokens: int) -> list[Turn]:
    """Return the turns in token ids of this model. Raises BadRowError."""
    turns = episode.turns
    if not turns:
        raise BadRowError("it has no turn")
    has_ids = all(turn.usage is None for turn in turns)
    if has_ids and all(chat.reply_text(turn.completion_ids) == turn.reply for turn in turns):
        return turns
    if not all(turn.messages for turn in turns):
        raise BadRowError("its token ids are of another model, and its messages are not recorded")
    tools, messages = list[Tool](), list[Message]()
    for turn in turns:
        for message in turn.messages:
            if message["role"] == "tools":
                tools = json.loads(message["content"])
            else:
                messages.append(message)
        messages.append(_as_message(turn.reply, tools))
    new = turns_of(Conversation(messages=messages, tools=tools), chat, max_tokens)
    return [
        replace(one, steps=turn.steps, unusable=turn.unusable)
        for one, turn in zip(new, turns, strict=True)
    ]


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
