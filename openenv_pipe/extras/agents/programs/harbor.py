"""What the verifier of a Harbor task says of an episode, from the results that Harbor leaves."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.system.user_numbers import MAX_REWARD

RESULTS = "*/*/result.json"  # JOB/TRIAL/result.json
REWARD = "reward"  # the name of the number that is the reward
MAX_BYTES = 16 * 2**20  # of a result that is read
MAX_LENGTH = 300  # characters of what Harbor says of an exception


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """The numbers of a verifier."""

    reward: float | None  # None: there is none
    numbers: Mapping[str, float] = field(default_factory=dict)  # all of them, by name
    problem: str = ""  # why there is no reward


def take_verdict(results: Path) -> TrialResult:
    """Read the verdict of the one trial in a folder of Harbor's jobs, and remove the folder."""
    try:
        found = list(results.glob(RESULTS))
        if len(found) != 1:
            return TrialResult(
                reward=None, problem=f"Harbor left {len(found)} results of trials, expected 1"
            )
        with found[0].open("rb") as file:
            return read_verdict(file.read(MAX_BYTES))
    except OSError as error:
        return TrialResult(
            reward=None, problem=f"the result of Harbor's trial cannot be read: {error}"
        )
    finally:
        shutil.rmtree(results, ignore_errors=True)


def read_verdict(data: bytes) -> TrialResult:
    """Return the verdict in a trial's `result.json`."""
    try:
        result = parse_untrusted(data)
    except ValueError as error:
        return TrialResult(reward=None, problem=f"the result of Harbor's trial is no JSON: {error}")
    numbers = _member(_member(result, "verifier_result"), "rewards")
    usable = {str(name): float(value) for name, value in numbers.items() if _is_number(value)}
    if REWARD in usable:
        return TrialResult(reward=usable[REWARD], numbers=usable)
    exception = _member(result, "exception_info")
    if exception:
        said = f"{exception.get('exception_type')}: {exception.get('exception_message')}"
        return TrialResult(reward=None, problem=shortened(said, MAX_LENGTH))
    seen = shortened(json.dumps(numbers), MAX_LENGTH)
    return TrialResult(
        reward=None,
        problem=f"the verifier wrote {seen}, expected a number named {REWARD}, "
        f"of at most {MAX_REWARD:g} in size",
    )


def _member(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) if isinstance(parent, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= MAX_REWARD
