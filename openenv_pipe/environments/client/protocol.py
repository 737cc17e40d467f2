"""Parse the frames of OpenEnv's WebSocket protocol into results and errors.

These are pure functions of text; `url` is the server's and appears in the errors. Rewards that
are not finite are errors.
"""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openenv_pipe.errors import ServerFullError, SessionClosedError, SessionError, StepRefusedError

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

REFUSALS = ("EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE")

# Built once, because json.dumps with options builds an encoder for every call.
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
decode = json.JSONDecoder().decode


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to `reset` or `step`."""

    observation: dict[str, Any]
    reward: float | None  # finite; None if the environment gave none
    done: bool


def parse_frame(text: str | bytes, url: str) -> dict[str, Any]:
    """Decode a frame.

    Raises:
        SessionError: The frame is not a JSON object.
    """
    try:
        frame = decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise SessionError(f"{url}: answer is not JSON ({error}): {text[:80]!r}") from error
    if type(frame) is not dict:
        raise SessionError(f"{url}: answer is not a JSON object: {text[:80]!r}")
    return frame


def error_of_frame(frame: dict[str, Any], kind: str, url: str) -> SessionError:
    """Make the error for a frame that does not answer `kind`.

    It is a StepRefusedError if the session can still be used.
    """
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


def is_mistake(refusal: StepRefusedError, env: "EnvConfig") -> bool:
    """True if a refused step is the player's mistake, and not the failure of the episode."""
    if refusal.code == "EXECUTION_ERROR":
        return env.step_exception == "unusable"
    return refusal.code == "VALIDATION_ERROR"


def step_result(data: dict[str, Any], url: str) -> StepResult:
    """Read the answer to reset or step.

    Raises:
        SessionError: The data breaks the protocol.
    """
    observation, reward = data.get("observation"), data.get("reward")
    if type(observation) is not dict:
        raise SessionError(f"{url}: observation is not a JSON object: {observation!r:.80}")
    if reward is not None:
        reward = _finite(reward, url)
    return StepResult(observation, reward, bool(data.get("done")))


def error_details(errors: Any) -> str:
    """List the fields that a VALIDATION_ERROR names: ' (word: Field required; ...)'."""
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
        f"{url}: reward is {reward!r:.80}, expected a finite number or null; fix the environment"
    )
