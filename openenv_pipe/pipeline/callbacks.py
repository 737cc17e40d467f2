"""The callbacks of the Python API, which are called after each step and may stop the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from openenv_pipe.errors import ConfigError
from openenv_pipe.runs.run import Run
from openenv_pipe.system.user_code import UserCode
from openenv_pipe.system.user_numbers import shown

STOPPED = "stopped by a callback"  # the cause of such a run begins with it; the run may be resumed
LIMIT_S = 3600.0  # of one call

OnStep = Callable[[Run, Mapping[str, Any]], str | None]


class StepCallback(Protocol):
    """An object whose `on_step` is called after each step of the warm start and of GRPO."""

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        """Return None to continue, or the reason why the run should stop.

        run: the run's folder. metrics: the step's line of metrics.jsonl, which is written by then.
        """


Callback = OnStep | StepCallback


class Callbacks:
    """Calls all callbacks of a run as user code."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._functions: list[tuple[UserCode, Callable[..., Any]]] = []
        for callback in callbacks:
            function: Any = getattr(callback, "on_step", callback)
            # The caller of `train` gets the callbacks' exceptions.
            code = UserCode(f"the callback {callback!r}", limit_s=LIMIT_S, passed=(Exception,))
            self._functions.append((code, function))

    async def call(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        """Call all callbacks; return the reasons to stop the run, None if there are none.

        Raises:
            ConfigError: a callback returned neither None nor text, or did not return in time.
                Exceptions that callbacks raise pass through.
        """
        reasons = []
        for code, function in self._functions:
            reason = await code.call(function, run, metrics)
            if reason is not None and not isinstance(reason, str):
                raise ConfigError(
                    f"{code.name} returned {shown(reason)}; expected None to continue, or the "
                    "reason to stop as text"
                )
            if reason is not None:
                reasons.append(reason)
        if not reasons:
            return None
        return f"{STOPPED} after {metrics['stage']} step {metrics['step']}: {'; '.join(reasons)}"
