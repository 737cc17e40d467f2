"""Progress in a notebook: one output of the cell, which changes in place.

It shows the notes, the last steps, and the current phase. IPython, which a notebook's kernel has,
is imported only when it is used.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openenv_pipe.system.progress import EpisodeCount, LineProgress
from openenv_pipe.system.untrusted_text import for_people

MAX_STEPS = 5  # the last ones that are shown
MAX_NOTES = 50


class NotebookProgress(LineProgress):
    """Shows the lines of a run in a single display of the notebook's cell."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        super().__init__(self._add)
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._steps: deque[str] = deque(maxlen=MAX_STEPS)
        self._phases: dict[object, str] = {}  # in the order in which they began
        self._display = DisplayHandle()
        self._is_displayed = False

    @contextmanager
    def phase(self, text: str, count: EpisodeCount | None = None) -> Iterator[None]:
        key = object()
        self._phases[key] = text
        self._show()
        try:
            yield
        finally:
            del self._phases[key]
            is_all = not (self._phases or self._notes or self._steps)
            self._show(f"{text}: done" if is_all else "")

    def remind(self, text: str) -> None:
        self._show(f"{text} ...")

    def stage(self, name: str, total_steps: int) -> None:
        super().stage(name, total_steps)
        self._steps.clear()

    def advance(self, record: Mapping[str, Any]) -> None:
        self._steps.append(self._line_of_step(record))
        self._show()

    def _add(self, text: str) -> None:
        self._notes.append(text)
        self._show()

    def _show(self, now: str = "") -> None:
        """Show all lines again. now: the last line; default: the innermost phase."""
        # Another thread may end the phase meanwhile.
        now = now or "".join(f"{phase} ..." for phase in [*self._phases.values()][-1:])
        lines = [*self._notes, *self._steps, *([now] if now else [])]
        shown = {"text/plain": "\n".join(map(for_people, lines))}
        show = self._display.update if self._is_displayed else self._display.display
        self._is_displayed = True
        show(shown, raw=True)
