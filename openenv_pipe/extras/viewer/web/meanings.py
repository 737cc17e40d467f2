"""What each metric means, as docs/metrics.md says it, which a wheel includes."""

import re
from functools import cache
from typing import TypedDict

from openenv_pipe.system.resources import shipped_dir

ROW = re.compile(r"^\| (`[^|]*`) \| ((?:[^|]|\\\|)*) \|(?: ((?:[^|]|\\\|)*) ?\|)?$", re.MULTILINE)


class Meaning(TypedDict):
    """The texts of one metric, without Markdown."""

    meaning: str
    hint: str  # when to look at it; may be empty


@cache
def meanings() -> dict[str, Meaning]:
    """Return the texts by metric. Where several metrics share a row, they share its texts."""
    page = shipped_dir("docs") / "metrics.md"
    if not page.is_file():
        return {}
    found: dict[str, Meaning] = {}
    for names, meaning, hint in ROW.findall(page.read_text(encoding="utf-8")):
        texts = Meaning(meaning=_plain(meaning), hint=_plain(hint))
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = texts
    return found


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("`", "").replace("\\|", "|").strip()
