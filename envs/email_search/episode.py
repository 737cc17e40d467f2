"""One episode: a question, a limited number of calls, and at most one answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from .grading import Grade, grade
from .index import Hit, index
from .mailbox import Message, mailbox
from .tasks import Task

DEFAULT_CALLS, MAX_CALLS = 10, 50
MAX_HITS = 10
NO_CALLS_LEFT = "No calls are left: answer now."


class OutOfTurn(Exception):  # noqa: N818 - the agent sees it as the error of its call
    """The call is not allowed, because the episode is over or its calls are used up."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """The state of an episode. A call beyond the last allowed one ends it without an answer."""

    task: Task
    max_calls: int
    calls: int = 0
    is_over: bool = False
    grade: Grade | None = None

    def search(self, query: str, limit: int) -> str:
        """Return the hits as text, two lines for each. Raises OutOfTurn."""
        self.spend_call()
        hits = index(self.task.mailbox_number).search(query, max(1, min(limit, MAX_HITS)))
        lines = [_hit_text(hit) for hit in hits] or ["No message has any of these words."]
        return "\n".join(lines + self._warning())

    def read(self, message_id: str) -> str:
        """Return a message as text. Raises OutOfTurn."""
        self.spend_call()
        message = index(self.task.mailbox_number).get(message_id)
        text = _message_text(message) if message else f"There is no message {message_id[:20]!r}."
        return "\n".join([text, *self._warning()])

    def answer(self, text: str, message_ids: Sequence[str]) -> str:
        """Grade the answer and end the episode. Raises OutOfTurn."""
        if self.is_over:
            raise OutOfTurn("The episode is over. Reset to start another.")
        box = mailbox(self.task.mailbox_number)
        self.grade = grade(self.task.question, box, text, message_ids)
        self.is_over = True
        return "The answer was taken."

    def spend_call(self) -> None:
        """Count a call. If none is left, end the episode and raise OutOfTurn."""
        if self.is_over:
            raise OutOfTurn("The episode is over. Reset to start another.")
        if self.calls == self.max_calls:
            self.is_over = True
            raise OutOfTurn(f"All {self.max_calls} calls were used; the episode is over.")
        self.calls += 1

    def _warning(self) -> list[str]:
        return [NO_CALLS_LEFT] if self.calls == self.max_calls else []


def _hit_text(hit: Hit) -> str:
    message = hit.message
    head = f"{message.message_id} | {message.time:%Y-%m-%d} | {message.sender} | {message.subject}"
    return f"{head}\n  {hit.snippet}"


def _message_text(message: Message) -> str:
    return (
        f"Id: {message.message_id}\nDate: {message.time:%Y-%m-%d %H:%M}\nFrom: {message.sender}\n"
        f"Subject: {message.subject}\n\n{message.body}"
    )
