"""The answers of a judge that a run has paid for, and what they cost.

They are in the run's folder of verdicts, one file each. Answers that the run reads in the folder of
another run, or uses again, are paid for once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.engines.openai import num_reported_tokens
from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.files import read_json

FAILED = "failed"  # the key of why there was no answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    num_tokens: int
    cost: float


def paid_answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers in a folder of verdicts; failures and damaged files are left out."""
    for path in sorted(folder.glob("*/*.json")):
        try:
            answer = read_json(path)
        except RunFolderError:
            continue
        if isinstance(answer, dict) and FAILED not in answer:
            yield answer


def price_of(answer: Mapping[str, Any], per_million_prompt: float, per_million: float) -> Price:
    """Return what an answer cost, by the usage that the endpoint reports; without it 0.

    per_million_prompt, per_million: the prices of a million tokens of prompts and of answers
    """
    num_prompt = num_reported_tokens(answer, "prompt_tokens") or 0
    num_answer = num_reported_tokens(answer, "completion_tokens") or 0
    cost = (num_prompt * per_million_prompt + num_answer * per_million) / 1e6
    return Price(num_tokens=num_prompt + num_answer, cost=cost)
