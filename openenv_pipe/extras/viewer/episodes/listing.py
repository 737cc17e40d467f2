"""Recorded episodes as text, Markdown or JSON: chosen by the index, read from their files."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from openenv_pipe.extras.viewer.episodes.index import EpisodeIndex, file_of
from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter, IndexedEpisode
from openenv_pipe.runs.episodes import RecordedEpisode, iterate_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.transcript import headline, reward_text, transcript, whole_transcript
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_json import encodable_json
from openenv_pipe.system.untrusted_text import code_block, for_markdown, for_people

DEFAULT_COUNT = 10  # episodes that are shown if no number is given
MAX_COUNT = 10**9

Form = Literal["text", "md", "json"]
# The other options of the command, by the name of the condition.
OPTIONS = {
    "first_step": "--step",
    "task": "--task",
    "status": "--status",
    "reward_from": "--min-reward",
    "reward_to": "--max-reward",
    "reward_term": "--term",
    "text": "--text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which episodes are wanted, and how many: the worst, the best, or the first ones."""

    wanted: EpisodeFilter
    worst: int | None = None
    best: int | None = None
    first: int | None = DEFAULT_COUNT  # None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundEpisode:
    entry: IndexedEpisode
    recorded: RecordedEpisode

    @property
    def place(self) -> str:
        """Say where it is from: `step 40, group 3, member 1`."""
        where = self.entry.source if self.entry.step is None else f"step {self.entry.step}"
        return f"{where}, group {self.recorded.group}, member {self.recorded.episode.member}"


def find_episodes(folder: RunFolder, selection: Selection) -> Iterator[FoundEpisode]:
    """Yield the episodes of a selection, reading one file at a time. Raises RunFolderError."""
    with EpisodeIndex.open(folder.path) as index:
        entries = _entries(index, selection)
    for (source, step), chosen in groupby(entries, key=lambda each: (each.source, each.step)):
        by_line = {each.line: each for each in chosen}
        recorded = iterate_episodes(file_of(folder.path, source, step), set(by_line))
        # Lines that are not there are of a file that has been replaced since it was indexed.
        if selection.worst is None and selection.best is None:
            yield from (FoundEpisode(entry=by_line[each.line], recorded=each) for each in recorded)
        else:
            found = {each.line: each for each in recorded}
            for line in filter(found.__contains__, by_line):
                yield FoundEpisode(entry=by_line[line], recorded=found[line])


def _entries(index: EpisodeIndex, selection: Selection) -> list[IndexedEpisode]:
    found = []
    for count, is_descending in ((selection.worst, False), (selection.best, True)):
        if count is not None:
            found += index.find(
                selection.wanted, order="reward", descending=is_descending, limit=count
            )
    if selection.worst is None and selection.best is None:
        limit = MAX_COUNT if selection.first is None else selection.first
        return index.find(selection.wanted, limit=limit)
    return [*{(each.source, each.step, each.line): each for each in found}.values()]


def as_text(found: Iterable[FoundEpisode], form: Form, *, is_whole: bool = False) -> Iterator[str]:
    """Yield the text of each episode; JSON has one object a line.

    is_whole: the messages as the model was shown them, uncut.
    """
    written = whole_transcript if is_whole else transcript
    for each in found:
        episode = each.recorded.episode
        if form == "json":
            yield _dump(as_json(each))
        elif form == "md":
            block = code_block(written(episode))
            yield f"### {for_markdown(each.place)}\n\n{headline(episode)}\n\n{block}\n"
        else:
            title = f"{each.place}: task {episode.task.id}, status {episode.status}"
            yield for_people(f"{title}, {_result(each)}") + f"\n{written(episode)}\n"


def as_json(found: FoundEpisode) -> dict[str, Any]:
    """Return what people read of an episode, without its tokens."""
    episode, entry = found.recorded.episode, found.entry
    return {
        "source": entry.source,
        "step": entry.step,
        "group": found.recorded.group,
        "member": episode.member,
        "task": episode.task.id,
        "status": episode.status,
        "success": episode.success,
        "reward": episode.reward if episode.is_scored else None,
        "reward_terms": episode.reward_terms,
        "advantages": found.recorded.advantages,
        "error": episode.error,
        "unscored": episode.unscored,
        "first_observation": episode.first_observation,
        "turns": [
            {
                "messages": turn.messages,
                "parent": parent,
                "role": turn.role,
                "reply": turn.reply,
                "finish": turn.finish,
                "unusable": turn.unusable,
                "steps": [
                    {"action": s.action, "observation": s.observation, "reward": s.reward}
                    for s in turn.steps
                ],
            }
            for turn, parent in zip(episode.turns, episode.parents, strict=True)
        ],
        "judgements": {name: each.explanation for name, each in episode.judgements.items()},
    }


def _dump(value: Mapping[str, Any]) -> str:
    """Write JSON in ASCII, in which no character acts on a terminal."""
    (plain,) = encodable_json([value])
    return redact(json.dumps(plain)).replace("\x7f", "\\u007f")


def _result(found: FoundEpisode) -> str:
    episode = found.recorded.episode
    terms = ", ".join(f"{name} {value:g}" for name, value in episode.reward_terms.items())
    success = "success" if episode.success else "no success"
    return f"{success}, {reward_text(episode)}{f' ({terms})' if terms else ''}"


def none_found(folder: RunFolder, selection: Selection) -> str:
    """Say that a selection is empty, what limited it, and where the run has episodes."""
    with EpisodeIndex.open(folder.path) as index:
        sources = index.choices().sources
    labels = [name.removeprefix("eval/") for name in sorted(sources) if name != TRAIN]
    parts = [f"{sources[TRAIN]} of training"] if TRAIN in sources else []
    parts += [f"those of the evaluations {', '.join(labels)} (--eval LABEL)"] if labels else []
    has = f"it has {' and '.join(parts)}" if parts else "it has none at all"
    limits = " ".join(_options(selection.wanted)) or "of training"
    return for_people(f"{folder.record.id} has no such episodes ({limits}); {has}")


def _options(wanted: EpisodeFilter) -> Iterator[str]:
    if wanted.source not in (None, TRAIN):
        yield f"--eval {str(wanted.source).removeprefix('eval/')}"
    if wanted.success is not None:
        yield "--success" if wanted.success else "--no-success"
    if wanted.is_scored:
        yield "with a reward"
    for name, option in OPTIONS.items():
        if (value := getattr(wanted, name)) is not None:
            yield f"{option} {value if isinstance(value, int | float) else shlex.quote(value)}"
