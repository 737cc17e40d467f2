"""The runs of a search: one at each learning rate, which stops after a few steps.

A trial is the beginning of a whole run at its rate, schedule included. A repeated command finds the
trials by their configuration in the folder of runs, and goes on with what is left to do.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openenv_pipe import pipeline
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_in_config, known_secrets
from openenv_pipe.errors import RankLostError, RunFolderError, TrainingError
from openenv_pipe.extras.learning_rate.choice import Trial
from openenv_pipe.extras.learning_rate.request import KEY, Request
from openenv_pipe.runs.checkpoints import WARM_START_END, checkpoint_path
from openenv_pipe.runs.differences import find_differences
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.runs.provenance import find_checkouts
from openenv_pipe.runs.run import Run
from openenv_pipe.runs.trust import local_code
from openenv_pipe.system.progress import EpisodeCount, Progress


def run_trials(
    request: Request, command: Sequence[str], control: pipeline.RunControl
) -> list[Trial]:
    """Train at each rate, and return what that has measured, by ascending rate.

    A rate whose run ends with a TrainingError does not end the search.

    Raises as `pipeline.train`, and KeyboardInterrupt after `control.stop`; what is done is saved.
    """
    trials = []
    for number, lr in enumerate(request.trials, start=1):
        title = f"lr {lr:g} ({number} of {len(request.trials)})"
        folder = _run(request, lr, command, title, control)
        trials.append(
            Trial.of(
                lr,
                folder.record.id,
                _steps(folder)[: request.num_steps],
                max_mismatch=request.config.trainer.max_mismatch,
                failure=folder.record.cause if _has_failed(folder) else None,
            )
        )
    return trials


def _run(
    request: Request, lr: float, command: Sequence[str], title: str, control: pipeline.RunControl
) -> RunFolder:
    composed = request.trials[lr]
    known = _known_runs(composed.config)
    own = known.get(lr)
    if own is not None and (_has_failed(own) or len(_steps(own)) >= request.num_steps):
        control.progress.note(f"{title}: {own.record.id} has these steps already")
        return own

    def stop(run: Run, metrics: Mapping[str, Any]) -> str | None:
        is_last = metrics["stage"] == "grpo" and metrics["step"] >= request.num_steps
        return "openenv-pipe lr takes no more steps at one rate" if is_last else None

    control = replace(
        control,
        progress=_TrialProgress(control.progress, title, request.num_steps),
        callbacks=[stop],
        evaluates=False,
        continued_by=shlex.join(command),
    )
    ends = (each for each in known.values() if checkpoint_path(each.path, WARM_START_END).is_dir())
    warmed_up = next(ends, None)
    try:
        if own is not None:
            return pipeline.resume(str(own.path), [], command, control)
        if warmed_up is not None:
            start = f"{warmed_up.path}@{WARM_START_END.step}"
            return pipeline.fork(start, [f"{KEY}={lr!r}"], command, control)
        return pipeline.train(composed, command, control)
    except RankLostError:
        raise
    except TrainingError:
        # The git checkout may have changed since the run began.
        failed = _known_runs(composed.config, of_this_code=False).get(lr)
        if failed is None:
            raise
        return failed


def _known_runs(config: RunConfig, *, of_this_code: bool = True) -> dict[float, RunFolder]:
    """Return the newest run of a configuration at each learning rate.

    of_this_code: leave out runs of other code, versions or machines, because they cannot be
        compared, and those from another state of the working directory's git checkout.
    """
    values = config.model_dump(mode="json")
    wanted = hide_in_config(values, known_secrets(values))
    found, checkouts = {}, [diff.checkout for diff in find_checkouts(local_code(config))]
    for path in sorted((Path(config.runs_dir) / config.name).glob("[0-9]*/run.json")):
        try:
            folder = RunFolder.open(path.parent)
            written = folder.written_config
        except RunFolderError:  # `openenv-pipe runs` shows it as unreadable.
            continue
        lr = written.trainer.optimizer.lr
        values = written.model_dump(mode="json")
        values["trainer"]["optimizer"]["lr"] = config.trainer.optimizer.lr
        if folder.record.lineage is not None:
            if not folder.checkpoints():
                continue  # It was killed before it had the weights to start from.
            # A fork has the template time of the run that it is made from.
            values["model"]["template_time"] = config.model.template_time
        if of_this_code and (
            folder.record.checkouts != checkouts or find_differences(folder.record)
        ):
            continue
        if values == wanted:
            found[lr] = folder
    return found


def _has_failed(folder: RunFolder) -> bool:
    cause = folder.record.cause or ""
    return folder.status == "failed" and cause.startswith(f"{TrainingError.__name__}:")


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    return [each for each in read_metrics(folder.metrics_path) if each["stage"] == "grpo"]


@dataclass(frozen=True, slots=True)
class _TrialProgress:
    progress: Progress
    title: str
    num_steps: int

    def phase(self, text: str, count: EpisodeCount | None = None) -> AbstractContextManager[None]:
        return self.progress.phase(text, count)

    def remind(self, text: str) -> None:
        self.progress.remind(text)

    def stage(self, name: str, total_steps: int) -> None:
        total = self.num_steps if name == "grpo" else total_steps
        self.progress.stage(f"{self.title} {name}", total)

    def advance(self, record: Mapping[str, Any]) -> None:
        self.progress.advance(record)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def close(self) -> None:
        self.progress.close()
