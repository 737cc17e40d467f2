"""What to write here instead of the name that another trainer has for it."""

from typing import Any

from openenv_pipe.extras.coming_from.names import LOSS_TYPES, NOT_HERE, NOTES, OTHER_NAMES
from openenv_pipe.system.resources import group_options


def advice(name: str, value: Any) -> str | None:
    """Return what stands here for a key that does not exist; None if no other trainer has it.

    name: the last part of the key, or `loss` for what chooses a loss.
    """
    if name in NOT_HERE:
        return NOT_HERE[name]
    if name in ("loss", "loss_type") and isinstance(value, str) and value in LOSS_TYPES:
        keys = LOSS_TYPES[value]
        answer = f"is {keys}" if keys else "has no equivalent here"
        return f"TRL's loss_type={value} {answer} (docs/coming_from.md)"
    own = OTHER_NAMES.get(name)
    if own is None:
        return None
    if own == "trainer.loss.type" and value in group_options("trainer"):
        own = f"trainer={value}"
    note = f", {NOTES[name]}" if name in NOTES else ""
    return f"what other trainers call {name} is {own} here{note}"
