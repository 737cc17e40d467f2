"""The callbacks of the Python API, which are called after each step and may stop the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from openenv_pipe.runs.run import Run

STOPPED = "stopped by a callback"  # begins the cause of such a run, which may be resumed

OnStep = Callable[[Run, Mapping[str, Any]], str | None]


class StepCallback(Protocol):
    """An object whose `on_step` is called after each step of the warm start and of GRPO."""

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        """Return None to continue, or the reason why the run should stop.

        run: the run's folder. metrics: the step's line of metrics.jsonl, which is written by then.
        """


Callback = OnStep | StepCallback


def call_back(callbacks: Sequence[Callback], run: Run, metrics: Mapping[str, Any]) -> str | None:
    """Call all callbacks; return the reasons to stop the run, None if there are none.

    Raises:
        TypeError: a callback returned neither None nor text. Errors of callbacks pass through.
    """
    reasons = []
    for callback in callbacks:
        function: Any = getattr(callback, "on_step", callback)
        reason = function(run, metrics)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(
                f"the callback {callback!r} returned {reason!r}; expected None to continue, or "
                "the reason to stop as text"
            )
        if reason is not None:
            reasons.append(reason)
    if not reasons:
        return None
    return f"{STOPPED} after {metrics['stage']} step {metrics['step']}: {'; '.join(reasons)}"
