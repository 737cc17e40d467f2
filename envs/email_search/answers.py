"""Draw answers, write them into messages, and find them in an agent's text.

Dates are `datetime.date`, amounts (in cents) and numbers are integers, and all others are names.
"""

import random
import re
from datetime import date, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from .kinds import AMOUNT, DATE, NUMBER

YEAR = 2025
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_MONTH = "(" + "|".join(f"{month[:3]}(?:{month[3:]})?" for month in MONTHS) + r")\.?"
_DATES = (
    re.compile(r"\b(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})\b"),
    re.compile(
        rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\.? (?:of )?(?P<month>{_MONTH})"
        r"(?:,? (?P<year>\d{4}))?\b",
        re.IGNORECASE,
    ),
    re.compile(
        rf"\b(?P<month>{_MONTH}) (?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?:,? (?P<year>\d{{4}}))?\b",
        re.IGNORECASE,
    ),
)
_NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+)?(?!\w)")


def draw(kind: str, names: dict[str, tuple[str, ...]], rng: random.Random) -> Any:
    """Draw a random answer of a kind; `names` has the pools of names."""
    if kind == AMOUNT:
        return rng.randrange(20_000, 2_000_000, 5)
    if kind == NUMBER:
        return rng.randrange(100, 1000)
    if kind == DATE:
        return date(YEAR, 1, 1) + timedelta(days=rng.randrange(365))
    return rng.choice(names[kind])


def write(kind: str, answer: Any, rng: random.Random) -> str:
    """Return the answer in one of the ways in which people write it."""
    if kind == AMOUNT:
        amount = f"{answer // 100:,}.{answer % 100:02}"
        return rng.choice((f"EUR {amount}", f"{amount} EUR", f"€{amount}"))
    if kind == DATE:
        month = MONTHS[answer.month - 1]
        styles = (
            f"{answer.day} {month} {answer.year}",
            f"{month} {answer.day}, {answer.year}",
            answer.isoformat(),
        )
        return rng.choice(styles)
    return str(answer)


def found_in(text: str, kind: str, names: dict[str, tuple[str, ...]]) -> set[Any]:
    """Return all different answers of a kind that a text contains."""
    if kind == AMOUNT:
        return {round(number * 100) for number in _numbers(text.replace("€", " "))}
    if kind == NUMBER:
        return set(_numbers(text))
    if kind == DATE:
        return _dates(text)
    words = f" {plain(text)} "
    return {name for name in names[kind] if f" {plain(name)} " in words}


def plain(text: str) -> str:
    """Return the text as lowercase words, separated by single spaces."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _numbers(text: str) -> set[Decimal]:
    found = set()
    for number in _NUMBER.findall(text):
        try:
            found.add(Decimal(number.replace(",", "")))
        except InvalidOperation:
            continue
    return found


def _dates(text: str) -> set[date]:
    found = set()
    for pattern in _DATES:
        for match in pattern.finditer(text):
            month = match["month"]
            number = int(month) if month.isdigit() else _month_number(month)
            try:
                found.add(date(int(match["year"] or YEAR), number, int(match["day"])))
            except ValueError:
                continue
    return found


def _month_number(name: str) -> int:
    starts = [month[:3].lower() for month in MONTHS]
    return starts.index(name[:3].lower()) + 1
