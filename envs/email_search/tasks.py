"""Tasks and splits. Task i asks about mailbox i modulo the split's number of mailboxes.

The first tasks of a split are therefore about different mailboxes. The two splits share none, and
each mailbox draws its own names and numbers.
"""

import random
from dataclasses import dataclass

from .mailbox import QUESTIONS_PER_MAILBOX, Question, mailbox

MAILBOXES = {"train": range(12), "eval": range(1000, 1003)}


class TaskError(ValueError, IndexError):
    """A split, index, seed or number of calls that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A question and the number of the mailbox that answers it."""

    mailbox_number: int
    question: Question


def num_tasks(split: str) -> int:
    """Return the number of tasks of a split. Raises TaskError for an unknown split."""
    if split not in tuple(MAILBOXES):  # A tuple, because a client may send unhashable values.
        raise TaskError(f"split must be one of {', '.join(MAILBOXES)}, got {split!r}")
    return len(MAILBOXES[split]) * QUESTIONS_PER_MAILBOX


def choose_task(split: str, index: int | None, seed: int | None) -> Task:
    """Return the task by `index`, else by `seed`, else random.

    Raises TaskError if the split, index or seed does not exist.
    """
    count = num_tasks(split)
    if index is None:
        if seed is not None and type(seed) is not int:
            raise TaskError(f"seed must be an integer or null, got {seed!r}")
        index = random.Random(seed).randrange(count)
    if type(index) is not int or not 0 <= index < count:
        raise TaskError(
            f"index must be an integer from 0 to {count - 1} for split {split!r}, got {index!r}"
        )
    position, place = divmod(index, len(MAILBOXES[split]))
    number = MAILBOXES[split][place]
    return Task(mailbox_number=number, question=mailbox(number).questions[position])
