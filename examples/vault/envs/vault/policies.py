"""Scripted policies, which write the calls that a model would write."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .game import ACTIVITIES, HELD_OUT


def expert(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Look where the activity belongs, and unlock."""
    activity = observations[0]["activity"]
    [room] = [each for each in ACTIVITIES if activity in ACTIVITIES[each] + HELD_OUT[each]]
    return _unlock(observations) or _call("look", room=room)


def searching(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Look into random rooms, whatever the activity, until one has the code; then unlock."""
    return _unlock(observations) or _call("look", room=rng.choice(list(ACTIVITIES)))


def _unlock(observations: Sequence[Mapping[str, Any]]) -> str | None:
    results = [each["result"]["data"] for each in observations[1:] if each["result"]]
    codes = re.findall(r"\d+", " ".join(results))
    return _call("unlock", code=int(codes[0])) if codes else None


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
