"""The Python API: `from openenv_pipe import compose, train, evaluate, open_run`.

All of it works in any thread and inside a running event loop such as a notebook's: the work is
done in a thread of its own. No signal handler is installed. KeyboardInterrupt, which a notebook's
stop button raises, saves the run and ends it; a second one gives up saving.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openenv_pipe.commands.api_calls import RunName, in_thread, run_control, run_name
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.run import Run

if TYPE_CHECKING:  # it imports torch
    from openenv_pipe.pipeline import Callback


def compose(*overrides: str) -> RunConfig:
    """Return the validated configuration for overrides such as "conf=wordle".

    Raises ConfigError.
    """
    from openenv_pipe.config import compose as composing

    return composing.compose(overrides).config


def train(
    *overrides: str,
    resume: RunName | None = None,
    fork: RunName | None = None,
    trust: bool = False,
    callbacks: Sequence["Callback"] = (),
    on_progress: Callable[[str], object] | None = None,
) -> Run:
    """Train until the run ends: `train("conf=wordle", "trainer.steps=10")`.

    resume: a run to continue, of whose configuration only a few keys may change.
    fork: a run, or its checkpoint as "RUN@40" or "RUN@best", to start a new run from.
    trust: run what that run's folder names, also if another user made it or it was changed.
    callbacks: called as `on_step(run, metrics)` after each step; see `pipeline.callbacks`.
    on_progress: receives each line of progress; default: the log, at level INFO.
    Raises ConfigError and RunFolderError for what the caller has to correct, before there is a run
    folder if it can be known by then, FailureError if the run fails, and KeyboardInterrupt if it
    was interrupted. The run folder, once there is one, says why.
    """
    if resume is not None and fork is not None:
        raise ConfigError("resume continues a run, fork starts a new one; give one of them")
    from openenv_pipe import pipeline

    control = run_control(on_progress, callbacks)
    command = ["openenv_pipe.train", *overrides]

    def work() -> Run:
        if resume is not None:
            folder = pipeline.resume(run_name(resume), overrides, command, control, trust=trust)
        elif fork is not None:
            folder = pipeline.fork(run_name(fork), overrides, command, control, trust=trust)
        else:
            from openenv_pipe.config.compose import compose

            folder = pipeline.train(compose(overrides), command, control)
        return Run(folder.path)

    return in_thread(work, control)


def evaluate(
    *subjects: RunName,
    trust: bool = False,
    on_progress: Callable[[str], object] | None = None,
) -> dict[str, EvalReport]:
    """Evaluate runs side by side on the same tasks, or a model that no run has trained.

    subjects: runs, or their checkpoints as "RUN@40" and "RUN@best", and overrides such as
    "eval.num_tasks=20"; without a run, "conf=NAME" and overrides.
    trust: run what the runs' folders name, also if another user made them or they were changed.
    Returns the new reports by name, "wordle/0007 step_000040"; they are kept in the run folders.
    Raises ConfigError, RunFolderError and FailureError.
    """
    from openenv_pipe.commands.evaluate import evaluate as evaluate_words

    control = run_control(on_progress)
    words = [run_name(subject) for subject in subjects]
    result = in_thread(
        lambda: evaluate_words(words, ["openenv_pipe.evaluate", *words], control, trust=trust),
        control,
    )
    return {row.name: row.report for row in result.played}
