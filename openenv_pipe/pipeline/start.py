"""Start a new run, resume one from its last checkpoint, or fork one from any checkpoint.

A resumed run keeps its configuration: changes of most keys are rejected by name. Other differences,
such as of code, versions or data, are reported and recorded in run.json.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from openenv_pipe.config.compose import Composed
from openenv_pipe.config.diff import changed_keys
from openenv_pipe.config.learning_rates import warn_of_lr
from openenv_pipe.config.precision import warn_of_precision
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_in_config, known_secrets, restore_in_config
from openenv_pipe.config.unused_keys import unused_keys
from openenv_pipe.environments.hosts.early import EarlyHost
from openenv_pipe.errors import ConfigError, PipeError, RankLostError, RunFolderError
from openenv_pipe.pipeline.callbacks import STOPPED
from openenv_pipe.pipeline.fork_state import Changed, copy_checkpoint
from openenv_pipe.pipeline.preparation import prepare
from openenv_pipe.pipeline.requirements import check_requirements
from openenv_pipe.pipeline.run import Attempt, RunControl, run
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.runs.checkpoints import (
    WARM_START_END,
    StageStep,
    all_checkpoints,
    can_begin_anew,
    fork_command,
    is_resumable,
    newest_sound,
)
from openenv_pipe.runs.differences import Difference, find_differences, of_measures
from openenv_pipe.runs.find import find_run, find_weights, split_checkpoint, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.rewind import rewind
from openenv_pipe.system.progress import Progress

# `trainer.guard` may not change to or from `back`: how often a run has gone back, and so its
# learning rate, follows from its metrics.
MAY_CHANGE = (
    "trainer.steps",
    "trainer.guard",
    "trainer.devices",
    "trainer.replicas",
    "trainer.checkpoint.",
    "cluster",
    "eval.during.",
    "tracker",
)


def train(
    composed: Composed, command: Sequence[str], control: RunControl, early: EarlyHost | None = None
) -> RunFolder:
    """Start a new run in a new folder. Raises ConfigError, and the exceptions of `run`.

    early: the environment's host, if its servers have begun to start.
    """
    warnings = (warn_of_lr(composed.config), warn_of_precision(composed.config))
    for text in filter(None, (*unused_keys(composed), *warnings)):
        control.progress.note(text)
    with control.progress.phase("checking what the run needs"):
        check_requirements(composed.config)
    control.stop.run(prepare(composed.config, control.progress.note))
    folder = RunFolder.create(composed.config, overrides=composed.overrides, command=command)
    config = folder.with_template_time(composed.config)
    attempt = Attempt(folder=folder, config=config, servers=OwnServers(early))
    _run_with_restarts(attempt, command, control)
    return folder


def begin(
    folder: RunFolder, servers: ServerProvider, control: RunControl, *, trust: bool = False
) -> None:
    """Start a run in a folder that another process has made, such as a sweep for its job."""
    config = folder.config_to_run(trust=trust)
    folder.adopt()
    try:
        check_requirements(config, makes_folder=False)
    except PipeError as error:
        folder.finish("failed", cause=f"{type(error).__name__}: {error}")
        raise
    attempt = Attempt(folder=folder, config=config, servers=servers)
    _run_with_restarts(attempt, folder.record.command, control, servers)


def resume(
    name: str,
    overrides: Sequence[str],
    command: Sequence[str],
    control: RunControl,
    servers: ServerProvider | None = None,
    *,
    trust: bool = False,
) -> RunFolder:
    """Continue a run from its last sound checkpoint.

    trust: accept a folder that another user made, or that was changed since.

    Raises RunFolderError and ConfigError.
    """
    runs_dir, overrides = split_runs_dir(overrides)
    folder = find_run(name, runs_dir)
    with folder.held():
        config = folder.config_to_run(overrides, trust=trust)
        attempt = next_attempt(folder, config, _changes(folder, config), command, control, servers)
        _run_with_restarts(attempt, command, control, servers)
    return folder


def _run_with_restarts(
    attempt: Attempt,
    command: Sequence[str],
    control: RunControl,
    servers: ServerProvider | None = None,
) -> None:
    """Execute an attempt; if it loses a rank of the learner, go on from its last checkpoint.

    This happens up to `cluster.max_restarts` times. servers: those that all attempts use.
    """
    folder, num_left = attempt.folder, attempt.config.cluster.num_restarts
    with folder.held():
        while True:
            try:
                run(attempt, control)
                return
            except RankLostError as error:
                if num_left == 0:
                    raise
                control.progress.note(
                    f"{error}\nthe run goes on from its last checkpoint; cluster.max_restarts "
                    f"allows this {num_left} more times"
                )
                num_left -= 1
            attempt = next_attempt(folder, attempt.config, {}, command, control, servers)


def next_attempt(
    folder: RunFolder,
    config: RunConfig,
    changed: Changed,
    command: Sequence[str],
    control: RunControl,
    servers: ServerProvider | None = None,
    *,
    plays: bool = True,
) -> Attempt:
    """Rewind a run's folder, which the caller holds, to its last sound checkpoint.

    Returns a new attempt from there. plays: False if it trains on recorded episodes.
    """
    _reject_changes(folder, hide_in_config(changed, known_secrets(config.model_dump(mode="json"))))
    check_requirements(config, plays=plays, makes_folder=False, begins=False)
    progress = control.progress
    checkpoint = newest_sound(folder.path, resumable=True)
    place = StageStep.of(checkpoint) if checkpoint else None
    _check_can_continue(folder, config, place, changed)
    differences = find_differences(folder.record)
    _notify(progress, differences)
    folder.begin_attempt(
        config,
        command=command,
        checkpoint=checkpoint.name if checkpoint else None,
        changed=changed,
        differences=[str(difference) for difference in differences],
    )
    weights_only = [each.name for each in all_checkpoints(folder.path) if not is_resumable(each)]
    for damage in rewind(folder, place):
        progress.note(damage)
    where = ", the end of the warm start" if place == WARM_START_END else ""
    progress.note(f"resuming from {checkpoint.name if checkpoint else 'the beginning'}{where}")
    if checkpoint is None and weights_only:
        progress.note(
            f"{weights_only[-1]} was kept as the best, without the state to resume from; a smaller "
            f"trainer.checkpoint.every than {config.trainer.checkpoint.every} saves that more often"
        )
    return Attempt(
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        expected=folder.record.facts,
        on_differences=partial(_record_differences, folder, progress),
        servers=servers or OwnServers(),
    )


def fork(
    name: str,
    overrides: Sequence[str],
    command: Sequence[str],
    control: RunControl,
    *,
    trust: bool = False,
) -> RunFolder:
    """Start a new run from a checkpoint of another run.

    name: `RUN@STEP`, `RUN@best`, or `RUN` for its last checkpoint; `RUN@start` begins as that run
        did, with another configuration.
    trust: accept a folder that another user made, or that was changed since.

    Raises:
        RunFolderError: the run or the checkpoint does not exist or cannot be used.
        ConfigError: the overrides do not fit the checkpoint.
    """
    run_name, which = split_checkpoint(name)
    source, progress = find_run(run_name, split_runs_dir(overrides)[0]), control.progress
    config = source.config_to_run(overrides, trust=trust)
    changed = _changes(source, config)
    checkpoint = find_weights(source, which)
    check_requirements(config, begins=checkpoint is None)
    if checkpoint is not None:
        _check_can_fork(source, config, checkpoint, changed)
    lineage = source.lineage("fork", checkpoint.name if checkpoint else None, changed)
    control.stop.run(prepare(config, progress.note))
    folder = RunFolder.create(config, overrides=overrides, command=command, lineage=lineage)
    own = None
    if checkpoint is not None:
        left_out = copy_checkpoint(checkpoint, folder.path, source.written_config, config, changed)
        if left_out:
            progress.note(f"not taken over from the checkpoint: {', '.join(left_out)}")
        own = all_checkpoints(folder.path)[-1]
    attempt = Attempt(folder=folder, config=config, checkpoint=own)
    _run_with_restarts(attempt, command, control)
    return folder


def _check_can_fork(
    source: RunFolder, config: RunConfig, checkpoint: Path, changed: Changed
) -> None:
    """Raise an error if a checkpoint does not fit the configuration of its fork."""
    rejected = [key for key in changed if key.startswith("model.")]
    if rejected:
        raise ConfigError(
            f"{', '.join(rejected)} cannot change in a fork, because the weights of "
            f"{source.record.id} do not fit another model; train a new run"
        )
    place = StageStep.of(checkpoint)
    if place.stage == "warm_start":
        raise RunFolderError(
            f"{source.record.id} ended in its warm start, at {checkpoint.name}, from which it can "
            "be resumed but not forked; resume it with: openenv-pipe train --resume "
            f"{source.path}"
        )
    if place.step >= config.trainer.steps:
        raise ConfigError(
            f"{checkpoint.name} of {source.record.id} is at step {place.step}, and trainer.steps="
            f"{config.trainer.steps}, so no step is left to do; raise trainer.steps"
        )


def _changes(folder: RunFolder, config: RunConfig) -> Changed:
    """Return the keys that differ from a run's; a secret that is not in the environment does."""
    values = folder.written_config.model_dump(mode="json")
    own = RunConfig.model_validate(restore_in_config(values, needs_all=False))
    return changed_keys(folder.with_template_time(own), config)


def _reject_changes(folder: RunFolder, changed: Changed) -> None:
    """Raise ConfigError if a key was changed that a resumed run must keep."""
    rejected = [
        key
        for key, values in changed.items()
        if not key.startswith(MAY_CHANGE) or (key == "trainer.guard" and "back" in values)
    ]
    if rejected:
        lines = [f"  {key}: {changed[key][0]!r} -> {changed[key][1]!r}" for key in rejected]
        names = ", ".join(key.removesuffix(".") for key in MAY_CHANGE)
        command = fork_command(folder.path)
        how = f"from its last checkpoint: {command}" if command else "(no step of GRPO was saved)"
        raise ConfigError(
            f"{folder.record.id} cannot be resumed with other values of\n"
            + "\n".join(lines)
            + f"\nonly {names} may change (trainer.guard between warn and stop); to change "
            f"anything else, start a new run {how}"
        )


def _check_can_continue(
    folder: RunFolder, config: RunConfig, place: StageStep | None, changed: Changed
) -> None:
    """Raise an error if a run has nothing left to do, or no checkpoint to resume from."""
    record, steps = folder.record, config.trainer.steps
    if record.purpose == "evaluation":
        raise RunFolderError(
            f"{record.id} has evaluations only, so there is no training to continue; start one: "
            f"openenv-pipe train conf=NAME"
        )
    lineage, cause = record.lineage, record.cause or ""
    if lineage and not can_begin_anew(record) and place is None:
        raise RunFolderError(
            f"{folder.path} has no undamaged checkpoint, and as a {lineage.kind} of {lineage.run} "
            f"it cannot start from untrained weights; start again from {lineage.path}"
        )
    if place and place.stage == "grpo" and place.step > steps:
        raise ConfigError(
            f"trainer.steps={steps} is less than the {place.step} steps that {folder.record.id} "
            "has done; raise it, or fork an earlier checkpoint"
        )
    if folder.status == "finished" and not changed and not cause.startswith(STOPPED):
        why = cause or "so no step is left to do"
        raise RunFolderError(f"{record.id} is finished, {why}; {_how_to_train_on(folder, config)}")


def _how_to_train_on(folder: RunFolder, config: RunConfig) -> str:
    """Say which key lets a finished run go on: that which ended it, else the number of steps."""
    if folder.record.cause is None:
        return f"add trainer.steps={2 * config.trainer.steps} to train on"
    stops = ["eval.during.stop.at=null"] * (config.eval.during.stop.at is not None)
    stops += ["trainer.guard=warn"] * (config.trainer.guard == "stop")
    if stops:
        return f"add {' and '.join(stops)} to train on"
    return f"start a new run: {fork_command(folder.path) or 'openenv-pipe train conf=NAME'}"


def _notify(progress: Progress, differences: Sequence[Difference]) -> None:
    for difference in differences:
        progress.note(f"different from before: {difference}")


def _record_differences(
    folder: RunFolder, progress: Progress, differences: Sequence[Difference]
) -> None:
    _notify(progress, differences)
    texts = [str(difference) for difference in differences]
    folder.add_differences(texts)
    if of_measures(texts):
        progress.note(
            "warning: the code or the data that rewards depend on has changed, so rewards and "
            "evaluations of earlier attempts cannot be compared with those of this one"
        )
