"""Store all episodes of training: one gzipped JSONL file per step, one episode per line.

A line has the task, the group's id, the member, how the episode ended, its rewards and its turns.
Token ids and texts are plain JSON (`zcat FILE | head -1`). A turn's logprobs are base64 of
little-endian floats: `f4:...` if every value is exactly a float32, else `f8:...`. A turn of an
engine that takes messages has `usage` in place of ids and logprobs, which are empty. `messages` are
those that are new to the model in a turn, the tools first; `judgements` are a judge's words.

A turn has `parent`, the index of the turn that it continues (null: none), where that was stated; a
turn without it continues the turn before. It has `role` where that is not `agent`.

The loss mask is not stored: a sample is the prompt_ids and completion_ids of the turns on the path
to an agent's turn that no other turn continues; only the agent's completions are trained on
(`algorithms/samples.py`).

An image of an observation is `{"image": "images/NAME.png", "width": ..., "height": ...}`, and
its file lies in that place of the run folder. Equal images have one name, and are stored once.
In prompts of a vision-language model, an image's `token_id` replaces its placeholder tokens.

Equal episodes have equal bytes: the duration (`duration_s`) is not stored and reads as 0. A group
without episodes is not stored.
"""

import base64
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from sys import byteorder
from typing import Any

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.images import open_images, write_images
from openenv_pipe.runs.packed_lines import read_packed, write_packed
from openenv_pipe.system.budgets import EPISODE, MAX_TURNS, BudgetError
from openenv_pipe.system.files import parse_json
from openenv_pipe.system.secrets import redact
from openenv_pipe.types import (
    IMAGE_IDS,
    PREVIOUS,
    Episode,
    Finish,
    Group,
    Judgement,
    Status,
    Step,
    Task,
    Turn,
    TurnRole,
    Usage,
)

LINE = json.JSONEncoder(check_circular=False, separators=(",", ":"))
CODES = {"f4": "f", "f8": "d"}  # to the array module's type codes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEpisode:
    line: int  # from 1 on
    group: str
    episode: Episode
    advantages: list[float] | None  # one per turn; None: not trained on


def write_episodes(
    path: Path,
    groups: Sequence[Group],
    advantages: Sequence[GroupAdvantages] = (),
    *,
    folder: Path | None = None,
) -> None:
    """Write the episodes of one step atomically, after their images.

    folder: the run folder that gets the images; None: the one above the folder of `path`.
    advantages: those of the groups, if they were trained on. They are stored for readers of the
    file, as null for an episode that was not trained on.
    """
    write_images(
        folder or path.parent.parent, (each for group in groups for each in group.episodes)
    )
    by_group = {each.group.id: each for each in advantages}
    lines = []
    for group in groups:
        known = by_group.get(group.id)
        for episode in group.episodes:
            row = _row_of_episode(group.id, episode)
            row["advantages"] = known.of(episode) if known else None
            lines.append(LINE.encode(row) + "\n")
    text = redact("".join(lines))  # An environment may repeat a header that it was sent.
    write_packed(path, text)


def read_episodes(path: Path, *, folder: Path | None = None) -> list[Group]:
    """Read the groups of one step, as they were written except for `duration_s`.

    folder: the run folder that has their images; None: the one above the folder of `path`.

    Raises RunFolderError: The file is missing or damaged.
    """
    return as_groups(read_recorded_episodes(path, folder=folder))


def as_groups(recorded: Iterable[RecordedEpisode]) -> list[Group]:
    """Return the groups of recorded episodes; the episodes of a group get one task."""
    groups: dict[str, Group] = {}
    for each in recorded:
        group = groups.setdefault(
            each.group, Group(id=each.group, task=each.episode.task, episodes=[])
        )
        each.episode.task = group.task
        group.episodes.append(each.episode)
    return list(groups.values())


def read_recorded_episodes(
    path: Path, lines: Collection[int] | None = None, *, folder: Path | None = None
) -> list[RecordedEpisode]:
    """Read the episodes of one step with their advantages; `lines`: only those, from 1 on.

    folder: as in `read_episodes`.

    Raises RunFolderError: The file is missing or damaged.
    """
    return list(iterate_episodes(path, lines, folder=folder))


def iterate_episodes(
    path: Path, lines: Collection[int] | None = None, *, folder: Path | None = None
) -> Iterator[RecordedEpisode]:
    """Yield what `read_recorded_episodes` returns, with one episode at a time in memory."""
    for line, row in enumerate_rows(path, lines):
        try:
            recorded = RecordedEpisode(
                line=line,
                group=row["group"],
                episode=_episode_of_row(Task(**row["task"]), row),
                advantages=_advantages_of_row(row),
            )
            hash(recorded.group)
            _check_types(recorded.episode)
            open_images(recorded.episode, folder or path.parent.parent)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunFolderError(f"{path} has a damaged episode: {error!r:.200}") from error
        yield recorded


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an episodes file as dicts, with packed logprobs.

    Raises RunFolderError: The file is missing or damaged.
    """
    return (row for _, row in enumerate_rows(path))


def enumerate_rows(
    path: Path, lines: Collection[int] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers from 1 on and the contents of a file's lines, or of some of them.

    Raises RunFolderError: The file is missing or damaged.
    """
    for number, line in read_packed(path):
        if lines is None or number in lines:
            yield number, _parse_row(path, number, line)


def _parse_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    row = parse_json(f"{path}, line {number}", line, EPISODE)
    if not isinstance(row, dict):
        raise RunFolderError(f"{path}, line {number} is not an episode: {row!r:.80}")
    turns = row.get("turns")
    if isinstance(turns, list) and len(turns) > MAX_TURNS:
        raise BudgetError(
            f"{path}, line {number} has {len(turns):,} turns, more than {MAX_TURNS:,}, the most "
            "that is read; is the file damaged, or made to keep readers busy?"
        )
    return row


def episodes_path(folder: Path, step: int) -> Path:
    return folder / "episodes" / f"step_{step:06d}.jsonl.gz"


def all_episodes_paths(folder: Path) -> list[Path]:
    """Return the episodes files of a run's training steps, the first step's first."""
    return sorted((folder / "episodes").glob("step_*.jsonl.gz"))


def first_episodes_path(folder: Path) -> Path:
    """Return the episodes file of a run's first step of GRPO.

    Step 0 has what a warm start imitates. A fork begins with the step after its checkpoint.
    """
    first = episodes_path(folder, 1)
    return next((path for path in all_episodes_paths(folder) if path >= first), first)


def last_episodes_path(folder: Path) -> Path | None:
    """Return the newest episodes file, None without any."""
    return max(all_episodes_paths(folder), default=None)


def _row_of_episode(group: str, episode: Episode) -> dict[str, Any]:
    task = asdict(episode.task)
    for name in ("labels", "env"):
        if not task[name]:
            del task[name]
    row = {
        "group": group,
        "task": task,
        "member": episode.member,
        "seed": episode.seed,
        "status": episode.status,
        "error": episode.error,
        "reward": episode.reward,
        "success": episode.success,
        "reward_terms": episode.reward_terms,
        "whole_reward": episode.whole_reward,
        "turn_rewards": episode.turn_rewards,
        "first_observation": episode.first_observation,
        "turns": [_row_of_turn(turn) for turn in episode.turns],
    }
    if episode.judgements:
        row["judgements"] = {name: asdict(each) for name, each in episode.judgements.items()}
    if episode.unscored is not None:
        row["unscored"] = episode.unscored
    if episode.output:
        row["output"] = episode.output
    if episode.exit_code is not None:
        row["exit_code"] = episode.exit_code
    if episode.notes:
        row["notes"] = episode.notes
    return row


def _row_of_turn(turn: Turn) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt_ids": turn.prompt_ids,
        "completion_ids": turn.completion_ids,
        "logprobs": _pack(turn.logprobs),
        "finish": turn.finish,
        "policy_versions": turn.policy_versions,
        "reply": turn.reply,
        "steps": [_row_of_step(step) for step in turn.steps],
        "unusable": turn.unusable,
    }
    if turn.parent != PREVIOUS:
        row["parent"] = turn.parent
    if turn.role is not TurnRole.AGENT:
        row["role"] = turn.role
    if turn.usage is not None or turn.messages:
        row["messages"] = turn.messages
    if turn.usage is not None:
        row["usage"] = asdict(turn.usage)
    return row


def _row_of_step(step: Step) -> dict[str, Any]:
    return {"action": step.action, "observation": step.observation, "reward": step.reward}


def _episode_of_row(task: Task, row: Mapping[str, Any]) -> Episode:
    return Episode(
        task=task,
        member=row["member"],
        seed=row["seed"],
        first_observation=row["first_observation"],
        turns=[_turn_of_row(turn) for turn in row["turns"]],
        status=Status(row["status"]),
        error=row["error"],
        reward=row["reward"],
        whole_reward=row["whole_reward"],
        turn_rewards=row["turn_rewards"],
        reward_terms=row["reward_terms"],
        success=row["success"],
        judgements={name: Judgement(**each) for name, each in row.get("judgements", {}).items()},
        unscored=row.get("unscored"),
        output=row.get("output", ""),
        exit_code=row.get("exit_code"),
        notes=row.get("notes", []),
    )


def _advantages_of_row(row: Mapping[str, Any]) -> list[float] | None:
    advantages = row.get("advantages")  # Those of evaluations have none.
    return None if advantages is None else [float(each) for each in advantages]


def _check_types(episode: Episode) -> None:
    """Raise KeyError, TypeError or ValueError if a value of the episode is not of its kind."""
    steps = [step for turn in episode.turns for step in turn.steps]
    messages = [each for turn in episode.turns for each in turn.messages]
    texts = [turn.reply for turn in episode.turns]
    texts += [text for each in messages for text in (each["role"], each["content"] or "")]
    texts += [call for each in messages for call in each.get("calls", ())]
    texts += [
        episode.error or "",
        episode.output,
        *episode.notes,
        *episode.task.labels.values(),
        *(turn.unusable or "" for turn in episode.turns),
    ]
    numbers = [episode.reward, *episode.reward_terms.values(), *episode.turn_rewards]
    numbers += [episode.whole_reward, *(step.reward for step in steps)]
    numbers += [] if episode.exit_code is None else [episode.exit_code]
    for judgement in episode.judgements.values():
        texts.append(judgement.explanation)
        numbers += [judgement.num_calls, judgement.num_tokens, judgement.cost]
        numbers += [*judgement.positions, *judgement.scores]
    observations = [episode.first_observation, *(step.observation for step in steps)]
    for values, kind in ((texts, str), (numbers, (int, float)), (observations, dict)):
        for value in values:
            if not isinstance(value, kind):
                raise TypeError(f"{value!r:.80} is not of the type {kind}")
    list(map(float, numbers))  # An int may be too large for a float.
    for ids in (each for turn in episode.turns for each in (turn.prompt_ids, turn.completion_ids)):
        if not all(type(each) is int and 0 <= each < 2 * IMAGE_IDS for each in ids):
            raise ValueError("a token id is not a number of a token or of an image")
    _check_parents(episode.parents)


def _check_parents(parents: Sequence[int | None]) -> None:
    """Raise ValueError if a parent is not a turn of the episode, or turns continue each other."""
    ends: set[int] = set()  # turns whose way up is known to end at a root
    for index in range(len(parents)):
        way: list[int] = []
        place: int | None = index
        while place is not None and place not in ends:
            way.append(place)
            parent = parents[place]
            if parent is not None and (type(parent) is not int or not 0 <= parent < len(parents)):
                raise ValueError(f"the turn {place} continues {parent!r:.20}, which is not a turn")
            if parent in way:
                raise ValueError(f"the turn {place} continues one that continues it")
            place = parent
        ends.update(way)


def _turn_of_row(row: Mapping[str, Any]) -> Turn:
    unpacked = {
        "logprobs": _unpack(row["logprobs"]),
        "finish": Finish(row["finish"]),
        "steps": [Step(**step) for step in row["steps"]],
        "usage": Usage(**row["usage"]) if "usage" in row else None,
        "role": TurnRole(row.get("role", TurnRole.AGENT)),
    }
    return Turn(**{**row, **unpacked})


def _pack(values: Sequence[float]) -> str:
    """Encode floats without loss, in a third of the time and size of decimal numbers."""
    exact = array("d", values)
    short = array("f", values)
    name, packed = ("f4", short) if array("d", short) == exact else ("f8", exact)
    if byteorder == "big":
        packed.byteswap()
    return f"{name}:{base64.b64encode(packed.tobytes()).decode()}"


def _unpack(text: str) -> list[float]:
    name, _, packed = text.partition(":")
    values: array[float] = array(CODES[name], base64.b64decode(packed))
    if byteorder == "big":
        values.byteswap()
    return values.tolist()
