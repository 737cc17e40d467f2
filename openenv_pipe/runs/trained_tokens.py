"""Files beside those of the episodes, with what the learner computed for each trained token.

    episodes/tokens_000040.jsonl.gz     a line for each episode that step 40 has trained on

A line has the indices of the trained turns, and the values of their tokens one after another, as
base64 of 16-bit floats. Nothing but the viewer reads these files.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.episodes import enumerate_rows
from openenv_pipe.runs.packed_lines import write_packed
from openenv_pipe.types import Episode, Sample, TrainedTokens

MAX_TURNS = 1_000_000  # of a file
FLOAT16 = np.dtype("<f2")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTokens:
    turns: list[int]  # indices of the turns, in whose order the values are
    entropy: np.ndarray
    mismatch: np.ndarray  # the trainer's logprob minus the sampler's; NaN: not computed

    def by_turn(self, episode: Episode) -> dict[int, tuple[list[float], list[float]]]:
        """Return entropy and mismatch of each trained turn; {} if they are not this episode's."""
        if not all(0 <= turn < len(episode.turns) for turn in self.turns):
            return {}
        lengths = [len(episode.turns[turn].completion_ids) for turn in self.turns]
        if not sum(lengths) == len(self.entropy) == len(self.mismatch):
            return {}
        found, start = {}, 0
        for turn, length in zip(self.turns, lengths, strict=True):
            end = start + length
            found[turn] = self.entropy[start:end].tolist(), self.mismatch[start:end].tolist()
            start = end
        return found


def tokens_path(episodes: Path) -> Path:
    """Return the tokens file that belongs to an episodes file of training."""
    return episodes.with_name(episodes.name.replace("step_", "tokens_", 1))


def write_trained_tokens(
    path: Path, samples: Sequence[Sample], tokens: Sequence[TrainedTokens | None]
) -> None:
    """Write atomically what was computed for a step's samples. tokens: of each sample."""
    by_episode: dict[tuple[str, int], list[tuple[Sample, TrainedTokens]]] = {}
    for sample, values in zip(samples, tokens, strict=True):
        if values is not None:
            by_episode.setdefault((sample.group, sample.member), []).append((sample, values))
    lines = [
        json.dumps(
            {
                "group": group,
                "member": member,
                "turns": [turn for sample, _ in parts for turn in sample.trained_turns],
                "entropy": _pack([each.entropy for _, each in parts]),
                "mismatch": _pack([each.mismatch for _, each in parts]),
            }
        )
        for (group, member), parts in by_episode.items()
    ]
    write_packed(path, "\n".join(lines))


def read_trained_tokens(path: Path) -> Mapping[tuple[str, int], RecordedTokens]:
    """Read what is recorded for each episode, by group and member; {} without a file.

    Raises RunFolderError: The file is damaged.
    """
    if not path.exists():
        return {}
    found = {}
    num_turns = 0
    for number, row in enumerate_rows(path):
        try:
            turns = row["turns"]
            if not all(type(turn) is int for turn in turns):
                raise TypeError(f"turns is {turns!r:.80}")
            found[row["group"], row["member"]] = RecordedTokens(
                turns=turns, entropy=_unpack(row["entropy"]), mismatch=_unpack(row["mismatch"])
            )
        except (LookupError, TypeError, ValueError, binascii.Error) as error:
            raise RunFolderError(f"{path}, line {number} is damaged: {error!r:.200}") from error
        num_turns += len(turns)
        if num_turns > MAX_TURNS:
            raise RunFolderError(f"{path} is damaged: it has more than {MAX_TURNS:,} turns")
    return found


def _pack(parts: Sequence[np.ndarray]) -> str:
    return base64.b64encode(np.concatenate(parts).astype(FLOAT16).tobytes()).decode()


def _unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), FLOAT16)
