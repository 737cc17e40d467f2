"""When Python looks for unreachable objects, so that a command starts in less time.

Torch and transformers make a million objects that stay. While they are imported, Python would look
through them again and again, which takes a third of the time of the imports.
"""

import gc

WHILE_IMPORTING = (100_000, 50, 50)  # objects; multiples of the threshold before it
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Look for unreachable objects after many more new ones than usual, until the next call."""
    gc.set_threshold(*WHILE_IMPORTING)


def collect_as_usual() -> None:
    """Look for unreachable objects as Python does by itself, but only among new ones."""
    gc.freeze()
    gc.set_threshold(*_usual)
