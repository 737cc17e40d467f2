"""The outcome of a submission: how its run ended, and what each call returned."""

from dataclasses import dataclass, field
from typing import Any

RAN, NOT_LOADED, LIMIT, VIOLATION = "ran", "not loaded", "limit", "violation"

Error = tuple[str, str]  # class and message
MAX_TEXT = 200  # characters that are kept of a child's text
UNTOLD = "what is not said here, as the hidden tests had begun"


class SandboxError(RuntimeError):
    """Submissions cannot be run safely on this machine."""


class Ended(Exception):  # noqa: N818 - an outcome, not an error of the server
    """The run ended early; says how, and what was attempted or exceeded."""

    def __init__(self, ending: str, detail: str) -> None:
        super().__init__(ending, detail)
        self.ending = ending
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one call: a value of JSON's types, or an error."""

    value: Any = None
    error: Error | None = None


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How a run ended. `error` comes from loading the code; `results` has one list per batch."""

    ending: str = RAN
    detail: str = ""
    error: Error | None = None
    results: list[list[Result]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)


def garbled() -> Ended:
    """Return the ending for a malformed answer."""
    return Ended(VIOLATION, "an answer of its own making")


def raise_if_last(answer: dict[str, Any], is_told: bool = True) -> None:
    """Raise Ended if the child reports a violation or limit; quote its text if `is_told`."""
    for ending in (VIOLATION, LIMIT):
        if ending in answer:
            if type(answer[ending]) is not str:
                raise garbled()
            raise Ended(ending, _readable(answer[ending]) if is_told else UNTOLD)


def read_results(answer: dict[str, Any], expected: int) -> list[Result]:
    """Return the results of a batch of `expected` calls. Raises Ended for anything else."""
    results = answer.get("results")
    if type(results) is not list or len(results) != expected:
        raise garbled()
    return [_read_result(result) for result in results]


def read_error(error: Any) -> Error:
    """Return class and message, shortened. Raises Ended for anything else."""
    if type(error) is not list or [type(part) for part in error] != [str, str]:
        raise garbled()
    return _readable(error[0]), _readable(error[1])


def _readable(text: str) -> str:
    """Return a child's text, shortened, with `?` for halves of surrogate pairs.

    OpenEnv could not send those: a submission that raises them would make its step fail, and
    with it the episode, whose penalties would then not count.
    """
    return text[:MAX_TEXT].encode(errors="replace").decode()


def _read_result(result: Any) -> Result:
    if type(result) is dict and result.keys() == {"value"}:
        return Result(value=result["value"])
    if type(result) is dict and result.keys() == {"error"}:
        return Result(error=read_error(result["error"]))
    raise garbled()
