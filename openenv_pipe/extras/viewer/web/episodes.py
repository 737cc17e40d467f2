"""The data of the pages about episodes: the list, one episode, a group, a task over time."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, repeat
from typing import Any, TypeVar, get_args

from openenv_pipe.environments.images import find_references, reference_of, replace_references
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.episodes.index import file_of
from openenv_pipe.extras.viewer.episodes.listing import Selection, as_text, find_episodes
from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter, IndexedEpisode, Order
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.summaries import value_of
from openenv_pipe.extras.viewer.web.tokens import tokens_of, trained_tokens_of, weights_of
from openenv_pipe.runs.episodes import RecordedEpisode, read_recorded_episodes
from openenv_pipe.runs.images import FOLDER as IMAGES
from openenv_pipe.runs.transcript import branch_notes, message_text
from openenv_pipe.system.files import read_bytes
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import Turn

MAX_LISTED = 200  # episodes of one answer, such as those of a group, which may have a million
MAX_TEXT_LENGTH = 20_000  # characters of one text, unless the whole of it is asked for
MAX_IN_FILE = 100_000
NUM_BINS = 24
NUMBERS = ("first_step", "last_step")
BOUNDS = ("reward_from", "reward_below", "reward_to")
TEXTS = ("source", "task", "task_id", "group", "status", "reward_term", "text")
Number = TypeVar("Number", int, float)
FLAGS = ("success", "is_scored", "is_truncated", "has_unusable")
MAX_NUMBER_LENGTH = 40
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")


def list_episodes(store: RunStore, key: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the episodes that a page's address asks for, and what the filters can be set to.

    Raises RunFolderError: a filter is not a number, or an order is unknown.
    """
    wanted = wanted_of(query)
    order: Any = query.get("order", "step")
    if order not in get_args(Order):
        raise RunFolderError(
            f"order is {order!r:.80}; expected one of {', '.join(get_args(Order))}"
        )
    index = store.index(key)
    source = wanted.source or TRAIN
    episodes = index.find(
        wanted,
        order=order,
        descending=query.get("way") == "down",
        limit=MAX_LISTED,
        offset=max(0, _number(query, "offset", int) or 0),
    )
    # The bars show what the other filters leave, so that another bar can be chosen.
    unbounded = wanted_of({name: query[name] for name in query if name not in BOUNDS})
    histogram = index.histogram(unbounded, term=wanted.reward_term, num_bins=NUM_BINS)
    return {
        "total": index.count(wanted),
        "episodes": [asdict(episode) for episode in episodes],
        "histogram": histogram and asdict(histogram),
        "choices": asdict(index.choices(source)),
    }


def wanted_of(query: Mapping[str, str]) -> EpisodeFilter:
    """Read a filter from the parameters of an address; empty ones are ignored."""
    values: dict[str, Any] = {name: query.get(name) or None for name in TEXTS}
    values["source"] = values["source"] or TRAIN
    values |= {name: _number(query, name, int) for name in NUMBERS}
    values |= {name: _number(query, name, float) for name in BOUNDS}
    values |= {name: query[name] == "yes" for name in FLAGS if query.get(name) in ("yes", "no")}
    return EpisodeFilter(**values)


def list_tasks(store: RunStore, key: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the tasks of a source, the one with the lowest mean reward first.

    `steps` has the mean reward of each step that played the task.
    """
    source, index = query.get("source") or TRAIN, store.index(key)
    steps: dict[str, list[tuple[int, float]]] = {}
    for task, step, reward in index.task_steps(source):
        steps.setdefault(task, []).append((step, reward))
    return [{**asdict(task), "steps": steps.get(task.task, [])} for task in index.tasks(source)]


def export_lines(store: RunStore, key: str, query: Mapping[str, str]) -> Iterator[str]:
    """Yield the episodes that a page's address asks for, each as a line of JSON.

    Raises RunFolderError: a filter is not a number, or a file is damaged.
    """
    selection = Selection(wanted=wanted_of(query), first=None)
    found = as_text(find_episodes(store.folder(key), selection), "json")
    return (f"{line}\n" for line in found)


def show_episode(store: RunStore, key: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return one episode, and what the index knows of its group. Raises RunFolderError."""
    line = _number(query, "line", int)
    entries = _entries_of_file(store, key, query)
    entry = next((each for each in entries if each.line == line), None)
    if entry is None:
        raise RunFolderError(f"{key} has no episode of {_place(query)} in line {line}")
    (recorded,) = _read(store, key, [entry])
    members = [each for each in entries if each.group_id == entry.group_id]
    first = max(0, members.index(entry) - MAX_LISTED // 2)
    return {
        "entry": asdict(entry),
        "members": [asdict(each) for each in members[first : first + MAX_LISTED]],
        "num_members": len(members),
        "skipped": why_skipped(members, has_mask=masks_truncated(store, key)),
        **content_of(recorded, _served_from(key), whole=query.get("whole") == "yes"),
    }


def show_tokens(
    store: RunStore, key: str, query: Mapping[str, str], *, trust: bool
) -> dict[str, Any]:
    step, line = _number(query, "step", int), _number(query, "line", int)
    path = store.path(key)
    file = file_of(path, query.get("source") or TRAIN, step)
    found = read_recorded_episodes(file, {line or 0})
    if not found:
        raise RunFolderError(f"{key} has no episode of {_place(query)} in line {line}")
    trained = trained_tokens_of(file).get((found[0].group, found[0].episode.member))
    return {
        **tokens_of(found[0], trained, path, trust=trust),
        "weights": weights_of(store.folder(key), query.get("source") or TRAIN, found[0].episode),
    }


def show_group(store: RunStore, key: str, query: Mapping[str, str]) -> dict[str, Any]:
    members = _entries_of_file(store, key, query, group=query.get("group", ""))
    if not members:
        raise RunFolderError(f"{key} has no group {query.get('group')!r:.80} of {_place(query)}")
    shown = members[:MAX_LISTED]
    return {
        "members": [
            {"entry": asdict(entry), **content_of(recorded, _served_from(key), whole=False)}
            for entry, recorded in zip(shown, _read(store, key, shown), strict=True)
        ],
        "num_members": len(members),
        "skipped": why_skipped(members, has_mask=masks_truncated(store, key)),
    }


def masks_truncated(store: RunStore, key: str) -> bool:
    """Whether a run's episodes that a limit of tokens cut off have no loss."""
    return value_of(store.config(key), "trainer", "loss", "mask_truncated") is True


def why_skipped(members: Sequence[IndexedEpisode], *, has_mask: bool) -> str | None:
    """Say why training left out a group; None if it did not, or if nothing trains on it.

    has_mask: whether the run `masks_truncated`.
    """
    if members[0].source != TRAIN or any(each.advantage is not None for each in members):
        return None
    if members[0].step == 0:
        return "its episodes are demonstrations, which the warm start imitates"
    rewards = {each.reward for each in members if each.is_scored}
    if sum(each.is_scored for each in members) < 2:
        return "fewer than two of its episodes have a reward"
    if len(rewards) == 1:
        return f"all its episodes have the reward {rewards.pop():g}, so none is better than another"
    if has_mask and all(each.is_truncated for each in members if each.is_scored):
        return (
            "a limit cut off all its episodes that have a reward, and trainer.loss.mask_truncated "
            "gives these no loss"
        )
    return "its advantages are all zero"


def _read(store: RunStore, key: str, entries: Sequence[IndexedEpisode]) -> list[RecordedEpisode]:
    path = file_of(store.path(key), entries[0].source, entries[0].step)
    lines = {each.line for each in entries}
    found = read_recorded_episodes(path, lines)
    if len(found) != len(lines):  # It has been replaced since it was indexed.
        raise RunFolderError(f"{path} has just changed; try again")
    return found


def _entries_of_file(
    store: RunStore, key: str, query: Mapping[str, str], *, group: str | None = None
) -> list[IndexedEpisode]:
    """Return the episodes of a file that the index has, or those of one of its groups."""
    source, step = query.get("source") or TRAIN, _number(query, "step", int)
    wanted = EpisodeFilter(source=source, first_step=step, last_step=step, group=group)
    return store.index(key).find(wanted, limit=MAX_IN_FILE)


def _place(query: Mapping[str, str]) -> str:
    return f"{query.get('source') or TRAIN!r:.80}, step {query.get('step') or 'none'!r:.20}"


def read_image(store: RunStore, key: str, query: Mapping[str, str]) -> bytes:
    """Return the PNG file of an image of a run. Raises RunFolderError if there is none."""
    name = query.get("name", "")
    if not IMAGE_NAME.fullmatch(name):
        raise RunFolderError(f"{name!r:.80} is not the name of an image")
    return read_bytes(store.path(key) / IMAGES / name)


def _served_from(key: str) -> Callable[[str], str]:
    """Return the function from an image's name to the address where the server has it."""
    return lambda name: f"api/runs/{key}/image?name={name}"


def content_of(
    recorded: RecordedEpisode, address_of: Callable[[str], str], *, whole: bool
) -> dict[str, Any]:
    """Return what people read of an episode. address_of: from an image's name to its address."""
    episode, limit = recorded.episode, None if whole else MAX_TEXT_LENGTH
    advantages = chain(recorded.advantages or (), repeat(None))
    rewards = chain(episode.turn_rewards, repeat(None))
    columns = zip(episode.turns, branch_notes(episode), advantages, rewards, strict=False)
    turns = [
        {
            **_turn(turn, address_of, limit),
            "branch": note,
            "advantage": advantage,
            "turn_reward": reward,
        }
        for turn, note, advantage, reward in columns
    ]
    return {
        "task": {"id": episode.task.id, "seed": episode.task.seed, "reset": episode.task.reset},
        "first_observation": _observation(episode.first_observation, limit),
        "first_images": _images(episode.first_observation, address_of),
        "turns": turns,
        "reward_terms": episode.reward_terms,
        "whole_reward": episode.whole_reward,
        "error": _cut(episode.error, limit),
        "unscored": _cut(episode.unscored, limit),
        "notes": [_cut(note, limit) for note in episode.notes],
        "output": _cut(episode.output, limit),
        "exit_code": episode.exit_code,
        "judgements": {
            name: _cut(each.explanation, limit) for name, each in episode.judgements.items()
        },
    }


def _turn(turn: Turn, address_of: Callable[[str], str], limit: int | None) -> dict[str, Any]:
    return {
        "messages": [
            {"role": each["role"], "text": _cut(message_text(each), limit)}
            for each in turn.messages
        ],
        "reply": _cut(turn.reply, limit),
        "finish": turn.finish,
        "unusable": _cut(turn.unusable, limit),
        "steps": [
            {
                "action": _observation(step.action, limit),
                "observation": _observation(step.observation, limit),
                "images": _images(step.observation, address_of),
                "reward": step.reward,
            }
            for step in turn.steps
        ],
        "policy_versions": turn.policy_versions,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_completion_tokens": turn.num_completion_tokens,
    }


def _observation(value: Mapping[str, Any], limit: int | None) -> dict[str, str]:
    """Return the fields of an observation or an action as texts, without those that are empty."""
    value = replace_references(dict(value), _size)
    return {
        name: _cut(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False), limit)
        or ""
        for name, each in value.items()
        if each not in (None, "", [], {})
    }


def _images(
    observation: Mapping[str, Any], address_of: Callable[[str], str]
) -> list[dict[str, str]]:
    return [
        {"address": address_of(f"{reference_of(each)}.png"), "size": _size(each)}
        for each in find_references(observation)
    ]


def _size(reference: Mapping[str, Any]) -> str:
    return f"[image: {reference['width']} x {reference['height']} pixels]"


def _cut(text: str | None, limit: int | None) -> str | None:
    return text if text is None or limit is None else shortened(text, limit)


def _number(query: Mapping[str, str], name: str, kind: Callable[[str], Number]) -> Number | None:
    """Read a number of an address; None if it is not there. Raises RunFolderError."""
    text = query.get(name)
    if not text:
        return None
    try:
        number = kind(text) if len(text) <= MAX_NUMBER_LENGTH else None
    except ValueError:
        number = None
    if number is None or number != number:
        raise RunFolderError(f"{name} is {text!r:.80}; expected a number")
    return number
