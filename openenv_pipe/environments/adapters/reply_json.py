"""JSON objects in what a model wrote: anywhere in it, code fences or prose around them.

Refused: repairing. Half an object, single quotes or a trailing comma is told to the model, which
can then learn to write JSON; nothing is guessed. So are numbers and characters that the
environment could not be sent: infinities, NaN, halves of surrogate pairs.
"""

import json
import math
import re
from typing import Any

from openenv_pipe.environments.adapters.base import UnusableReply

THOUGHT_END = "</think>"
START = re.compile(r'\{\s*["}]')  # other braces are prose
LONGEST_EXCERPT = 60


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number that JSON can hold")
    return number


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def answer_of(reply: str) -> str:
    """The reply without what was thought before it."""
    return reply.rpartition(THOUGHT_END)[2]


def find_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, in their order; those inside of others are not among them.

    Raises UnusableReply for a broken one.
    """
    found, end = [], 0
    while start := START.search(text, end):
        try:
            value, end = _decoder.raw_decode(text, start.start())
            json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            near = text[max(start.start(), error.pos - LONGEST_EXCERPT // 2) :][:LONGEST_EXCERPT]
            raise UnusableReply(f"the JSON is broken: {error.msg} near {near!r}") from None
        except UnicodeEncodeError:
            raise UnusableReply("the JSON has characters that are not Unicode") from None
        except (ValueError, RecursionError) as error:
            raise UnusableReply(f"the JSON cannot be read: {error}") from None
        found.append(value)
    return found
