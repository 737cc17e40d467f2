"""The search of a sweep: Optuna proposes values and prunes jobs.

It uses Optuna's own API and not Hydra's sweeper plugin, which cannot stop a job and needs Optuna 2.
The study is a file in the sweep's folder, so a stopped search can be resumed. There is one goal,
and pruning is by the median of the other jobs.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps.folder import OVER, Job, SweepFolder, stop_mark
from openenv_pipe.extras.sweeps.multirun import Parameter
from openenv_pipe.extras.sweeps.schema import SearchSweep
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics

STUDY = "study.journal"
STAGE = "grpo"  # the stage whose records count
MAX_NAMED = 8  # metrics that an error lists
DIRECTIONS = {"max": "maximize", "min": "minimize"}


class Search:
    def __init__(
        self, folder: SweepFolder, config: SearchSweep, parameters: Sequence[Parameter]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder = folder
        self._config = config
        self._trials: dict[int, Trial] = {}  # trials of unfinished jobs, by job
        self._reported: dict[int, int] = {}  # last reported step, by job
        self._parameters = parameters
        self._space = {each.key: _distribution(each) for each in parameters}
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder.path / STUDY))),
            study_name=folder.record.stamp,
            load_if_exists=True,
            direction=DIRECTIONS[config.goal],
            # Each attempt has its own seed, so that a resumed search repeats no proposal.
            sampler=optuna.samplers.TPESampler(
                n_startup_trials=config.num_random, seed=config.seed + folder.record.attempt - 1
            ),
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=config.num_unpruned, n_warmup_steps=config.prune_from_step
            )
            if config.prune
            else optuna.pruners.NopPruner(),
        )

    def propose(self, shared: Sequence[str]) -> list[Job]:
        """Add the next jobs to the sweep; none if it is complete."""
        num_left = self._config.num_jobs - len(self._folder.record.jobs)
        proposed = []
        for _ in range(min(num_left, self._config.at_a_time)):
            trial = self._study.ask(self._space)
            chosen = [f"{key}={_text(value)}" for key, value in trial.params.items()]
            job = self._folder.add_job([*shared, *chosen], trial=trial.number)
            self._trials[job.index] = trial
            proposed.append(job)
        self._folder.write()
        return proposed

    def try_again(self, job: Job) -> None:
        """Run a stopped job again with the same values, as another trial of the study.

        The new trial gets the values that the run has recorded.
        """
        assert job.trial is not None
        self._study.enqueue_trial(self._study.trials[job.trial].params)
        self._study.tell(job.trial, state=TrialState.FAIL)
        trial = self._study.ask(self._space)
        self._trials[job.index] = trial
        self._folder.change_job(job.index, trial=trial.number)

    def see(self, job: Job, records: Sequence[Mapping[str, Any]]) -> None:
        """Report a running job's steps to the study, and mark the job if it is to be pruned."""
        for step, value in self._values(records):
            if step > self._reported.get(job.index, 0) and job.status == "running":
                self._reported[job.index] = step
                self._trials[job.index].report(value, step)
                if self._trials[job.index].should_prune():
                    stop_mark(self._folder.path, job.index).touch()

    def conclude(self, job: Job) -> None:
        """Report a finished job to the study, and store the value that it was judged by.

        This also works for jobs that ended unobserved, and may be repeated.

        Raises ConfigError if no job so far has had the metric, and this one could not have it.
        """
        if job.status not in OVER or job.trial is None:
            return
        self._trials.pop(job.index, None)
        run = self._folder.run_folder(job.index)
        values = self._values(read_metrics(run.metrics_path)) if run is not None else []
        if run is not None and job.status == "finished" and not values:
            self._reject_unknown_metric(run)
        if not values or job.status == "failed":
            self._study.tell(job.trial, state=TrialState.FAIL, skip_if_finished=True)
            return
        _, value = values[-1]
        told = (None, TrialState.PRUNED) if job.status == "pruned" else (value, None)
        self._study.tell(job.trial, *told, skip_if_finished=True)
        self._folder.change_job(job.index, value=value)

    def best(self) -> Job | None:
        done = [job for job in self._folder.record.jobs if job.status == "finished"]
        sign = 1 if self._config.goal == "max" else -1
        judged = [(sign * job.value, job) for job in done if job.value is not None]
        return max(judged, key=lambda pair: pair[0])[1] if judged else None

    def _reject_unknown_metric(self, run: RunFolder) -> None:
        """Raise ConfigError rather than search on without a result, as for a misspelt metric.

        A metric that a job with other settings has had may well be absent here.
        """
        key, records = self._config.metric, read_metrics(run.metrics_path)
        names = {name for record in records if record["stage"] == STAGE for name in record}
        if (
            not records
            or key in names
            or any(job.value is not None for job in self._folder.record.jobs)
        ):
            return
        if not names:
            raise ConfigError(
                f"sweep.metric={key}: {run.record.id} has no steps of {STAGE}, by which jobs are "
                "judged; set trainer.steps"
            )
        others = sorted(names - {"stage"})
        others.sort(key=lambda name: -SequenceMatcher(None, key, name).ratio())
        raise ConfigError(
            f"sweep.metric={key}: no step of {run.record.id} has this metric; start the "
            f"search anew with another, such as {', '.join(others[:MAX_NAMED])} "
            f"(all: {run.metrics_path})"
        )

    def _values(self, records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
        """Return the metric's mean over the last steps, by step."""
        key, mean_of = self._config.metric, self._config.mean_of
        found = [
            (record["step"], record[key])
            for record in records
            if record.get("stage") == STAGE and record.get(key) is not None
        ]
        means = []
        for position in range(len(found)):
            window = [value for _, value in found[max(0, position + 1 - mean_of) : position + 1]]
            means.append((found[position][0], sum(window) / len(window)))
        return means


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.kind == "choice":
        return CategoricalDistribution(parameter.values)
    low, high = parameter.values
    if parameter.kind == "whole":
        return IntDistribution(low, high, log=parameter.log, step=int(parameter.step or 1))
    return FloatDistribution(low, high, log=parameter.log, step=parameter.step)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
