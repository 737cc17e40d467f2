"""Find JSON objects anywhere in a model's reply, with code fences or prose around them.

Broken JSON (half an object, single quotes, a trailing comma) is never repaired: the model is told
and can learn to write JSON. Infinities, NaN, halves of surrogate pairs and what nests too deep
count as broken too, because they cannot be sent to the environment.
"""

import json
import math
import re
from typing import Any

from openenv_pipe.environments.adapters.base import UnusableReply
from openenv_pipe.system.foreign_json import require_shallow, too_deep

THOUGHT_END = "</think>"
START = re.compile(r'\{\s*["}]')  # Other braces are prose.
MAX_EXCERPT = 60


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number that JSON can hold")
    return number


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def without_thoughts(reply: str) -> str:
    """Return the reply without the reasoning before `</think>`."""
    return reply.rpartition(THOUGHT_END)[2]


def find_objects(text: str) -> list[dict[str, Any]]:
    """Return the outermost JSON objects in a text, in order.

    Raises:
        UnusableReply: An object is broken.
    """
    found, end = [], 0
    while start := START.search(text, end):
        try:
            value, end = _decoder.raw_decode(text, start.start())
            require_shallow(value, text[start.start() : end])
            json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            near = text[max(start.start(), error.pos - MAX_EXCERPT // 2) :][:MAX_EXCERPT]
            raise UnusableReply(f"the JSON is broken: {error.msg} near {near!r}") from None
        except UnicodeEncodeError:
            raise UnusableReply("the JSON has characters that are not Unicode") from None
        except RecursionError:
            raise UnusableReply(f"the JSON cannot be read: {too_deep()}") from None
        except ValueError as error:
            raise UnusableReply(f"the JSON cannot be read: {error}") from None
        found.append(value)
    return found
