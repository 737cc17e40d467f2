"""`env check --learn`: train a tiny model for a bounded time, and see whether it learns anything.

RFC 008 calls this the last level of an environment's validation.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openenv_pipe.commands.findings import Line, Result, failed
from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.pipeline import RunControl, train
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.run import Run
from openenv_pipe.system.progress import LineProgress

LEARNING = "learning"  # the name of the line
SECONDS = 60.0  # of a minute


def probe_learning(words: Sequence[str], *, minutes: float, notify: Callable[[str], None]) -> Line:
    """Train the experiment with the model `tiny`, and compare it with where it started.

    words: `conf=NAME` and overrides.
    minutes: after which no step begins; the evaluations before and after training come on top.
    notify: receives the run's progress. Raises ConfigError: as `tiny_experiment`.
    """
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-env-") as folder:
        composed = tiny_experiment([*words, f"runs_dir={folder}"])
        control = RunControl(progress=LineProgress(notify), callbacks=[_Clock(minutes * SECONDS)])
        try:
            run = Run(train(composed, [], control).path)
        except PipeError as error:
            return failed(LEARNING, error)
        num_steps = sum(row.get("stage") == "grpo" for row in run.metrics)
        return learning_line(run.evals, composed.config.eval, num_steps=num_steps)


def tiny_experiment(words: Sequence[str]) -> Composed:
    """Return the experiment that the words name, with the model `tiny`.

    Raises ConfigError: they name none, or it cannot be trained with that model.
    """
    if not any(word.startswith("conf=") for word in words):
        raise ConfigError(
            "--learn trains an experiment, which has a reward and a trainer beside the "
            "environment; name conf=NAME (`env inspect --output` writes one)"
        )
    return compose([*words, "model=tiny"])


class _Clock:
    """Stops a run after a time that begins with its first step."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._started_s: float | None = None

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s - float(metrics["time/step_s"])
        return "the time limit is reached" if now_s - self._started_s > self._limit_s else None


def learning_line(evals: Mapping[str, EvalReport], config: EvalConfig, *, num_steps: int) -> Line:
    """Say by how much the evaluation after training differs from the one before it.

    Learning is proven if the interval of the difference in reward or success is above 0.
    """
    difference = compare_reports(evals["start"], evals["trained"], config, seed=0)
    parts, measured = [], {"steps": float(num_steps)}
    for name in ("reward", "success"):
        change = getattr(difference, name)
        if change is None:
            continue
        start, _ = difference.means[name]
        parts.append(f"{name} {start:.3f}, then {change:+.3f} more")
        measured |= {f"{name}_start": start, f"{name}_added": change.mean}
        if change.low is not None and change.high is not None:
            measured |= {f"{name}_added_low": change.low, f"{name}_added_high": change.high}
    changes = [difference.reward, difference.success]
    is_proven = any(
        change is not None and change.excludes_zero and change.mean > 0.0 for change in changes
    )
    text = (
        f"in {num_steps} steps: {'; '.join(parts) or 'every episode failed'}, on "
        f"{difference.on_tasks}"
    )
    if is_proven:
        return Line(LEARNING, Result.OK, text, measured)
    return Line(LEARNING, Result.WARN, f"nothing was proven to be learnt {text}", measured)
