"""Extract the code from an agent's reply."""

import re

# The closing fence may be missing, because a reply may have been cut off. The numbers of spaces are
# bounded, so that the search takes time in proportion to the reply's length.
FENCE = re.compile(r"```[ \t]{0,20}(?:python3?|py)?[ \t]{0,20}\r?\n(.*?)(?:```|\Z)", re.DOTALL)
MAX_REPLY = 200_000  # characters of a reply that is searched for code
MAX_CODE = 50_000  # characters


def code_of(text: str) -> str:
    """Return the last fenced block with a function, else the last block, else the text itself."""
    blocks = FENCE.findall(text)
    with_function = [block for block in blocks if "def " in block]
    return (with_function or blocks or [text])[-1]
