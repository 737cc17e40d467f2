"""Words that a reader of this field would have to translate stay out of the project."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("openenv_pipe", "conf", "envs", "examples", "docs", "tests", "benchmarks")
SUFFIXES = {".py", ".md", ".yaml", ".js", ".css", ".html"}
# Each with the word of the field; CONTRIBUTING.md has the same table.
WORDS = {
    "refus": "reject, rejection",
    "pictur": "image",
    "foreign": "untrusted, third-party",
    "for ever\\b": "forever",
    "canary/": "logprob_check/",
    "\\btells? whether": "return whether",
    "\\blanes?\\b|_lanes?\\b|\\bwaves?\\b|_waves?\\b|cohort": "batch",
    "\\bdesk\\b": "queue",
    "begin_collection|a collection\\b": "rollout batch",
    "scripted player": "scripted policy",
}
# This list, and the words of an environment's e-mails.
EXEMPT = {Path(__file__), ROOT / "envs/email_search/vocabulary.py"}
# What other programs call by such a name.
ALLOWED = re.compile(r"connection ?refused|econnrefused|[\"']refusal[\"']", re.IGNORECASE)


def test_words_of_the_field_are_used():
    pattern = re.compile("|".join(WORDS), re.IGNORECASE)
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in SUFFIXES or path in EXEMPT or ".venv" in path.parts:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{number}: {match[0]}"
                for number, line in enumerate(lines, 1)
                if (match := pattern.search(ALLOWED.sub("", line)))
            ]
    assert not found, "\n".join(found)


def test_the_table_for_contributors_is_this_one():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for instead in WORDS.values():
        assert f"| {instead} |" in table
