"""Read what a judge has answered: JSON with scores, possibly with words around it."""

import json
import re
from typing import Any

from openenv_pipe.extras.judges.judge import UnusableAnswerError
from openenv_pipe.models.replies.formats import THINK
from openenv_pipe.models.replies.values import START

MAX_STARTS = 64  # opening braces that begin no complete object; each costs a pass over the text
_START = re.compile(START)


def json_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text, which is not inside another one.

    The last, because a judge that thinks aloud may quote what an episode says about its verdict.

    Raises UnusableAnswerError: there is none, or it cannot be told which one is the last.
    """
    begin, end_mark = THINK
    if text.lstrip().startswith(begin):
        _, mark, text = text.partition(end_mark)
        if not mark:
            raise UnusableAnswerError("it ends inside a thought")
    decoder = json.JSONDecoder()
    last: dict[str, Any] | None = None
    end = num_failed = 0
    while match := _START.search(text, end):
        try:
            last, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            end, num_failed = match.start() + 1, num_failed + 1
            if num_failed > MAX_STARTS:
                raise UnusableAnswerError(
                    f"more than {MAX_STARTS} braces begin no complete JSON object"
                ) from None
    if last is None:
        raise UnusableAnswerError("it has no complete JSON object")
    return last


def score_of(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:  # NaN is in no range
        raise UnusableAnswerError(
            f"the score of {what} is {str(value)[:80]!r}, expected 0.0 to 1.0"
        )
    return float(value)


def number_of(value: Any, count: int, what: str) -> int:
    """Return a number in 1..count that is given as 2, as "2" or in words as "turn 2".

    Raises UnusableAnswerError, which names what it is the number of.
    """
    numbers = [value] if type(value) is int else re.findall(r"\d{1,9}", str(value))
    if len(numbers) != 1 or not 1 <= int(numbers[0]) <= count:
        raise UnusableAnswerError(f"{what} {str(value)[:80]!r} is none of 1 to {count}")
    return int(numbers[0])
