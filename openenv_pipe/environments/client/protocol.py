"""Write and parse the frames of OpenEnv's WebSocket protocol.

These are pure functions of text; `url` is the server's and appears in the errors. What the model
wrote into an action never breaks the protocol: an action that no server could read is rejected.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openenv_pipe.errors import ServerFullError, SessionClosedError, SessionError, StepRejectedError
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_json import parse_untrusted, require_shallow
from openenv_pipe.system.untrusted_text import quoted, shortened
from openenv_pipe.system.user_numbers import MAX_REWARD

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

EXECUTION_ERROR = "EXECUTION_ERROR"  # the code of an exception of the environment's own
REJECTIONS = (EXECUTION_ERROR, "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE")
# AttributeErrors of OpenEnv's `serialize_observation`, for what is not an `Observation`.
NOT_AN_OBSERVATION = re.compile(r"'(\w+)' object has no attribute '(?:model_dump|reward|done)'$")
WANTED = "OpenEnv wants the observation alone, with its fields reward and done set"
RETURNED = {
    "NoneType": "nothing",
    "coroutine": "a coroutine, because it is `async def` (only reset_async and step_async may be)",
}
OUTCOME = {"reward", "done"}  # the fields of an answer beside its observation
MAX_ERROR_LENGTH = 2000  # characters of an error frame that are kept

# Built once, because json.dumps with options builds an encoder for every call.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to `reset` or `step`."""

    observation: dict[str, Any]
    reward: float | None  # at most MAX_REWARD in absolute value; None if the environment gave none
    done: bool


def request_frame(kind: str, data: Mapping[str, Any] | None, max_bytes: int) -> str:
    """Return the message of type `kind`.

    Raises StepRejectedError: `data` cannot be sent: it is not JSON (NaN, half a surrogate pair),
    nests too deep, or takes more than `max_bytes` bytes. The code is INVALID_JSON.
    """
    message: dict[str, Any] = {"type": kind}
    if data is not None:
        message["data"] = data
    try:
        text = _encode(message)
        require_shallow(message, text)
        if (num_bytes := len(text.encode())) > max_bytes:
            raise ValueError(f"it has {num_bytes} bytes, and at most {max_bytes} are allowed")
    except (TypeError, ValueError, RecursionError) as error:
        raise StepRejectedError("INVALID_JSON", f"{kind} not sent: {error}") from error
    return text


def parse_frame(text: str | bytes, url: str) -> dict[str, Any]:
    """Decode a frame. Raises SessionError: The frame is not a JSON object."""
    try:
        frame = parse_untrusted(text)
    except ValueError as error:
        raise SessionError(f"{url}: answer is not JSON ({error}): {quoted(text)}") from error
    if type(frame) is not dict:
        raise SessionError(f"{url}: answer is not a JSON object: {quoted(text)}")
    return frame


def error_of_frame(frame: dict[str, Any], kind: str, url: str) -> SessionError:
    """Make the error for a frame that does not answer `kind`.

    It is a StepRejectedError if the session can still be used.
    """
    data = frame.get("data")
    if frame.get("type") != "error" or type(data) is not dict:
        return SessionError(
            f"{url}: {kind} was answered with a frame of type {quoted(str(frame.get('type')))} "
            f"and data of type {type(data).__name__}, which the protocol does not know"
        )
    code, message = str(data.get("code"))[:80], _cut(str(data.get("message")))
    if code in REJECTIONS:
        details = _cut(error_details(data.get("errors")))
        return StepRejectedError(code, f"{message}{details}{_wrong_return(kind, message)}")
    if code == "CAPACITY_REACHED":
        return ServerFullError(f"{url}: {message}")
    return SessionClosedError(f"{url}: {code}: {message}")


def _wrong_return(kind: str, message: str) -> str:
    """Say what `reset` or `step` of an environment should have returned, if that is the error.

    OpenEnv calls `model_dump` of what they return, and reads its `reward` and `done`. In OpenEnv's
    own words, the error names only the attribute.
    """
    found = NOT_AN_OBSERVATION.match(message)
    if kind not in ("reset", "step") or found is None:
        return ""
    returned = RETURNED.get(found[1], f"a {found[1]}")
    return f"; {kind}() returned {returned}; {WANTED}"


def is_wrong_return(rejection: StepRejectedError) -> bool:
    """True if `reset` or `step` returned no observation, which no other action can change."""
    return str(rejection).endswith(WANTED)


def is_mistake(rejection: StepRejectedError, env: "EnvConfig") -> bool:
    """True if a rejected step is the policy's mistake and does not make the episode fail."""
    if rejection.code == EXECUTION_ERROR:
        return env.step_exception == "unusable"
    return rejection.code in ("VALIDATION_ERROR", "INVALID_JSON")  # rejected there, or before


def step_result(data: dict[str, Any], url: str) -> StepResult:
    """Read the answer to reset or step.

    Raises:
        SessionError: The data breaks the protocol.
    """
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done")
    if type(observation) is not dict:
        raise SessionError(f"{url}: observation is not a JSON object: {quoted(repr(observation))}")
    if not data.keys() & OUTCOME and observation.keys() & OUTCOME:
        raise SessionError(
            f"{url}: reward and done are inside the observation, where nothing reads them; the "
            "protocol has them beside it; fix the environment's server"
        )
    if reward is not None:
        if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:  # NaN: False
            raise SessionError(
                f"{url}: reward is {quoted(str(reward))}, expected null or a number of at most "
                f"{MAX_REWARD:g} in absolute value; fix the environment"
            )
        reward = float(reward)
    if done not in (None, False, True):  # The text "false" is no end.
        raise SessionError(
            f"{url}: done is {quoted(str(done))}, expected true or false; fix the environment"
        )
    return StepResult(observation, reward, bool(done))


def error_details(errors: Any) -> str:
    """List the fields that a VALIDATION_ERROR names: ' (word: Field required; ...)'."""
    if type(errors) is not list or not all(type(error) is dict for error in errors):
        return ""
    lines = [f"{_place(error.get('loc'))}: {error.get('msg')}" for error in errors]
    return f" ({'; '.join(lines)})" if lines else ""


def _place(location: Any) -> str:
    """Return the field of a validation error: `limits.0.price`."""
    parts = location if type(location) is list else [location] if location else []
    return ".".join(map(str, parts))


def _cut(text: str) -> str:
    if len(text) <= MAX_ERROR_LENGTH:
        return text
    return shortened(redact(text), MAX_ERROR_LENGTH)  # a cut could leave half of a secret
