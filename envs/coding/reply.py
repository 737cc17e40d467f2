"""From what an agent wrote to the code in it."""

import re

# The closing fence may be missing: a reply may have been cut off.
FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
MAX_CODE = 50_000  # characters


def code_of(text: str) -> str:
    """The last fenced block that defines a function, else the last one, else the text itself."""
    blocks = FENCE.findall(text)
    with_function = [block for block in blocks if "def " in block]
    return (with_function or blocks or [text])[-1]
