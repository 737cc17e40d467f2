"""The Python API: `from openenv_pipe import compose, train, evaluate, open_run`.

All of it works in any thread and inside a running event loop such as a notebook's: the work is
done in a thread of its own. No signal handler is installed. KeyboardInterrupt, which a notebook's
stop button raises, saves the run and ends it; a second one gives up saving.
"""

import contextvars
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Never, SupportsIndex, TypeVar

from openenv_pipe.commands.notebook_progress import NotebookProgress
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, Interrupted, PipeError
from openenv_pipe.runs.evals import env_of, label_in
from openenv_pipe.runs.notebook import EvalReports
from openenv_pipe.runs.run import Run
from openenv_pipe.system.process_settings import give_back_memory, set_library_defaults
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.user_modules import current_modules
from openenv_pipe.system.user_numbers import whole_number

if TYPE_CHECKING:  # these import torch
    from openenv_pipe.pipeline import Callback, RunControl
    from openenv_pipe.reports.eval_table import Row

Result = TypeVar("Result")
RunName = Run | str | os.PathLike[str]

set_library_defaults()  # before one of the API's functions imports torch


def compose(*overrides: str, **keys: Never) -> RunConfig:
    """Return the validated configuration for overrides such as "conf=wordle".

    keys: none; keys of the configuration are written as texts.
    Raises ConfigError.
    """
    from openenv_pipe.config import compose as composing

    _reject_keywords("compose", overrides, keys)

    with current_modules():
        return composing.compose([run_name(each) for each in overrides]).config


def train(
    *overrides: str,
    resume: RunName | None = None,
    fork: RunName | None = None,
    trust: bool = False,
    callbacks: Sequence["Callback"] = (),
    on_progress: Callable[[str], object] | None = None,
    **keys: Never,
) -> Run:
    """Train until the run ends: `train("conf=wordle", "trainer.steps=10")`.

    resume: a run to continue; only a few keys of its configuration may change.
    fork: a run, or its checkpoint as "RUN@40", "RUN@best" or "RUN@start", to start a new run from.
    trust: run what that run's folder names, even if another user made the folder or it was changed.
    callbacks: called as `on_step(run, metrics)` after each step; see `pipeline.callbacks`.
    on_progress: receives each line of progress; default: in a notebook one output of the cell,
    which changes in place, else the log, at level INFO.
    keys: none; keys of the configuration are written as texts.
    Raises ConfigError and RunFolderError for what the caller has to correct, if possible before
    there is a run folder; FailureError if the run fails; and, if it was interrupted,
    KeyboardInterrupt, whose message is the call that continues it. The run folder, once there is
    one, says why.
    """
    _reject_keywords("train", overrides, keys)
    if resume is not None and fork is not None:
        raise ConfigError("resume continues a run, fork starts a new one; give one of them")
    from openenv_pipe import pipeline

    control = run_control(on_progress, callbacks)
    overrides = tuple(run_name(each) for each in overrides)
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
    **keys: Never,
) -> EvalReports:
    """Evaluate runs side by side on the same tasks, or a model that no run has trained.

    subjects: runs, or checkpoints as "RUN@40", "RUN@best" and "RUN@start", and overrides such as
    "eval.num_tasks=20"; without a run, "conf=NAME" and overrides.
    trust: run what the runs' folders name, even if another user made them or they were changed.
    on_progress, keys: as in `train`.
    Returns the new reports by the subjects' names: the text that was given, or a run's id, or its
    folder if two have the same id. Their `differences` to the first are paired by task. The reports
    are kept in the run folders.
    Raises ConfigError, RunFolderError and FailureError.
    """
    _reject_keywords("evaluate", subjects, keys)
    from openenv_pipe.commands.evaluate import evaluate as evaluate_words
    from openenv_pipe.reports.eval_table import paired_with_first

    control = run_control(on_progress)
    words = [run_name(subject) for subject in subjects]
    runs = [subject for subject in subjects if isinstance(subject, Run)]
    taken = Counter(run.id for run in runs)  # runs of two machines may have the same id
    ids = {str(run.path): run.id for run in runs if taken[run.id] == 1}
    result = in_thread(
        lambda: evaluate_words(words, ["openenv_pipe.evaluate", *words], control, trust=trust),
        control,
    )

    def name_of(row: "Row") -> str:
        if not row.word:
            return row.name
        return label_in(ids.get(row.word, row.word), env_of(row.report.label))

    paired = paired_with_first(result.played, result.config.eval, result.config.seed)
    return EvalReports(
        ((name_of(row), row.report) for row in result.played),
        {name_of(row): change for _, compared in paired for row, change in compared if change},
    )


def _reject_keywords(function: str, words: Sequence[RunName], keys: Mapping[str, object]) -> None:
    """Raise ConfigError for keys of the configuration that are given as Python's keywords."""
    if not keys:
        return
    from openenv_pipe.config.schema_keys import known_keys

    known = sorted(known_keys(), key=lambda key: key.count("."))
    texts = [run_name(word) for word in words]
    for name, value in keys.items():
        named = (key for key in known if key == name or key.endswith(f".{name}"))
        texts.append(f"{next(named, name)}={value}")
    call = redact(", ".join(f'"{text:.80}"' for text in texts))
    raise ConfigError(
        f"{function} has no argument {next(iter(keys))!r}: keys of the configuration are texts, as "
        f"on the command line; write {function}({call})"
    )


def run_name(run: RunName) -> str:
    """Return a run as commands take it: its folder, or the word that was given for it.

    Raises ConfigError for what is not a Run, a string or a path.
    """
    if isinstance(run, Run):
        return str(run.path)
    if not isinstance(run, str | os.PathLike):
        raise ConfigError(
            f"{run!r:.80} is not a Run, a string or a path; write overrides and runs as on the "
            'command line, such as "conf=wordle", "trainer.steps=10" or "wordle/0007"'
        )
    return os.fspath(run)


def step_number(name: str, value: SupportsIndex | None) -> int | None:
    """Return an argument that is a step or a number of steps, also one of numpy; None stays None.

    Raises ConfigError if it is not a whole number from 1 on.
    """
    number = whole_number(value)
    if value is not None and (number is None or number < 1):
        raise ConfigError(f"{name}={value!r:.80}: expected a whole number from 1 on")
    return number


def run_control(
    on_progress: Callable[[str], object] | None, callbacks: Sequence["Callback"] = ()
) -> "RunControl":
    """Return the control of one run. Without `on_progress`, progress is one output of a notebook's
    cell, which changes in place, and goes to the log elsewhere.

    Raises ConfigError if an argument cannot be called.
    """
    from openenv_pipe.pipeline import RunControl
    from openenv_pipe.system.progress import LineProgress

    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks={callbacks!r:.80}: expected a list, such as [stop_when_good]")
    for each in callbacks:
        if not callable(each) and not hasattr(each, "on_step"):
            raise ConfigError(
                f"callbacks: {each!r:.80} is neither a function of a run and its metrics nor an "
                "object with the method on_step"
            )
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(
            f"on_progress={on_progress!r:.80}: expected a function that takes a line, such as print"
        )
    control = RunControl(callbacks=callbacks, continued_by='train(resume="{folder}")')
    if on_progress is not None:
        return replace(control, progress=LineProgress(on_progress))
    return replace(control, progress=NotebookProgress()) if _in_notebook() else control


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Colab's is a subclass.
    return any(each.__name__ == "ZMQInteractiveShell" for each in type(shell).__mro__)


def in_thread(work: Callable[[], Result], control: "RunControl") -> Result:
    """Do the work in a new thread and wait, because the caller's may run an event loop.

    The work uses the user's modules as they are now.

    Raises KeyboardInterrupt, without the traceback of the threads, after the work, if it was
    interrupted, even too late to stop anything.
    """
    try:
        with current_modules():
            return _done_in_thread(work, control)
    finally:
        give_back_memory()


def _stop(control: "RunControl") -> None:
    control.stop.make()
    will_save = not control.stop.is_repeated
    told = "and saving; repeat to stop without saving" if will_save else "without saving"
    control.progress.note(f"stopping {told}")


def _done_in_thread(work: Callable[[], Result], control: "RunControl") -> Result:
    is_interrupted = False
    with ThreadPoolExecutor(1, "openenv_pipe") as executor:
        future = executor.submit(contextvars.copy_context().run, work)
        while True:
            try:
                result = future.result()
                break
            except KeyboardInterrupt as error:
                if future.done():
                    raise Interrupted(*error.args) from None
                is_interrupted = True
                try:
                    _stop(control)
                except KeyboardInterrupt:  # a second one, while the first is reported
                    _stop(control)
            except PipeError as error:
                error.args = (redact(str(error)),)  # a notebook is a file too
                raise
    if is_interrupted:
        raise Interrupted("the work had ended when it was interrupted")
    return result
