"""Reproduce the word lists byte for byte: `python make_lists.py /usr/share/dict/scowl [OUTPUT]`.

The first argument is the folder of Debian's package `scowl`. The second is the folder to write the
lists and SHA256SUMS to (default: this script's folder). The lists have words of five letters a to z
from the English and American lists up to a level of commonness, without those in `excluded.txt`.
"""

import argparse
import hashlib
import re
from pathlib import Path

HERE = Path(__file__).parent
FIVE_LETTERS = re.compile("[a-z]{5}")
# name: (SCOWL levels, number of words to choose from them or None for all)
LISTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "tiny60": ((10,), 60),
    "common250": ((10,), 250),
    "common1000": ((10, 20), 1000),
    "full": ((10, 20, 35, 40, 50), None),
}


def read_levels(scowl: Path, levels: tuple[int, ...]) -> set[str]:
    """Return the five-letter words of these SCOWL levels, without the excluded ones."""
    excluded = set((HERE / "excluded.txt").read_text("ascii").split())
    lines: set[str] = set()
    for level in levels:
        for category in ("english", "american"):
            lines.update((scowl / f"{category}-words.{level}").read_text("utf-8").split("\n"))
    return {line for line in lines if FIVE_LETTERS.fullmatch(line)} - excluded


def choose(words: set[str], count: int | None) -> list[str]:
    """Choose `count` words (None: all), always the same ones, and return them sorted.

    The hash is salted so that this choice is independent of the order of the tasks.
    """
    ranked = sorted(words, key=lambda word: hashlib.sha256(f"choose {word}".encode()).digest())
    return sorted(ranked[:count])


def main() -> None:
    """Write all lists and their digests."""
    parser = argparse.ArgumentParser(description="Make the word lists.")
    parser.add_argument("scowl", type=Path, help="the folder of SCOWL's lists")
    parser.add_argument("output", type=Path, nargs="?", default=HERE)
    arguments = parser.parse_args()
    digests = []
    for name, (levels, count) in LISTS.items():
        words = choose(read_levels(arguments.scowl, levels), count)
        text = "".join(f"{word}\n" for word in words)
        (arguments.output / f"{name}.txt").write_text(text, "ascii")
        digests.append(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}.txt\n")
        print(f"{name}: {len(words)} words")
    (arguments.output / "SHA256SUMS").write_text("".join(digests), "ascii")


if __name__ == "__main__":
    main()
