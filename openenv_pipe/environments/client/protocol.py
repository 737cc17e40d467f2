"""What the frames of OpenEnv's protocol say: an answer's data, or the error that it is.

Pure functions of text; `url` is the server's, for the errors. Refused here: reading into
observations, and rewards that are no finite number.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from openenv_pipe.errors import ServerFullError, SessionClosedError, SessionError, StepRefusedError

REFUSALS = ("EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE")

# Built once: json.dumps with options builds an encoder for every call.
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
decode = json.JSONDecoder().decode


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answered to `reset` or `step`."""

    observation: dict[str, Any]
    reward: float | None  # finite; None where the environment gave none
    done: bool


def parsed(text: str | bytes, url: str) -> dict[str, Any]:
    """A frame as a dict. Raises SessionError."""
    try:
        frame = decode(text if type(text) is str else text.decode())
    except (ValueError, RecursionError) as error:
        raise SessionError(f"{url}: answer is not JSON ({error}): {text[:80]!r}") from error
    if type(frame) is not dict:
        raise SessionError(f"{url}: answer is not a JSON object: {text[:80]!r}")
    return frame


def refusal(frame: dict[str, Any], kind: str, url: str) -> SessionError:
    """The error that belongs to a frame which is no answer to `kind`: a StepRefusedError where the
    environment is still in step."""
    data = frame.get("data")
    if frame.get("type") != "error" or type(data) is not dict:
        return SessionError(
            f"{url}: {kind} was answered with a frame of type {frame.get('type')!r} "
            f"and data of type {type(data).__name__}, which the protocol does not know"
        )
    code, message = str(data.get("code")), str(data.get("message"))
    if code in REFUSALS:
        return StepRefusedError(code, message + error_details(data.get("errors")))
    if code == "CAPACITY_REACHED":
        return ServerFullError(f"{url}: {message}")
    return SessionClosedError(f"{url}: {code}: {message}")


def step_result(data: dict[str, Any], url: str) -> StepResult:
    """The answer to reset or step. Raises SessionError if it breaks the protocol."""
    observation, reward = data.get("observation"), data.get("reward")
    if type(observation) is not dict:
        raise SessionError(f"{url}: observation is no JSON object: {observation!r:.80}")
    if reward is not None:
        reward = _finite(reward, url)
    return StepResult(observation, reward, bool(data.get("done")))


def error_details(errors: Any) -> str:
    """The fields that a VALIDATION_ERROR names: ' (word: Field required; ...)'."""
    if type(errors) is not list or not all(type(error) is dict for error in errors):
        return ""
    lines = [
        f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg')}" for error in errors
    ]
    return f" ({'; '.join(lines)})" if lines else ""


def _finite(reward: Any, url: str) -> float:
    try:
        number = float(reward) if isinstance(reward, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return number
    raise SessionError(
        f"{url}: reward is {reward!r:.80}, expected a finite number or null; mend the environment"
    )
