"""What a fork takes over from a checkpoint of another run, and what it names as left out."""

import math
import shutil
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import PythonOrderConfig, RunConfig, TrainerConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.learner.checkpoint import (
    OPTIMIZER,
    REFERENCE,
    read_num_steps_taken,
    write_num_steps_taken,
)
from openenv_pipe.pipeline.league import LEAGUE
from openenv_pipe.pipeline.replay import REPLAY
from openenv_pipe.pipeline.source_state import AHEAD, ORDER
from openenv_pipe.runs.checkpoints import (
    RESUME,
    StageStep,
    all_checkpoints,
    is_resumable,
    new_checkpoint,
    read_digests,
)
from openenv_pipe.system.files import digest_of_file

# The state in a checkpoint's `resume/`: its name, its file, and the keys whose change makes it
# unusable.
RESUME_STATE = (
    ("the optimizer", OPTIMIZER, ("trainer.optimizer.type",)),
    ("the reference", REFERENCE, ()),
    ("the order of tasks", ORDER, ("seed", "env.tasks", "beside")),
    ("the league", LEAGUE, ("env.players", "beside")),
    ("the episodes to replay", REPLAY, ("env", "reward", "model", "beside")),
    ("the groups played ahead", AHEAD, ("seed", "env", "reward", "model", "trainer", "beside")),
)
LOST_REFERENCE = "the reference of the KL term (the weights of the checkpoint take its place)"
Changed = dict[str, list[JsonValue]]


def copy_checkpoint(
    checkpoint: Path, to: Path, saved: RunConfig, config: RunConfig, changed: Changed
) -> list[str]:
    """Copy a checkpoint into a new run, without the state that changed keys make unusable.

    Returns the names of the state that was left out. saved: the configuration of the checkpoint's
    run. config: that of the new run.
    """
    left_out = []
    with new_checkpoint(to, StageStep.of(checkpoint)) as path:
        for file in checkpoint.iterdir():
            if file.is_file():
                shutil.copyfile(file, path / file.name)
        (path / RESUME).mkdir()
        if not is_resumable(checkpoint):
            left_out = _deleted(checkpoint, saved, changed)
            if not _copy_frozen_reference(checkpoint, path / RESUME, saved):
                left_out += _lost_reference(checkpoint, saved, config)
        for what, name, keys in RESUME_STATE:
            file = checkpoint / RESUME / name
            if not file.exists():
                continue
            if any(key.startswith(keys) for key in changed):
                left_out.append(what)
                continue
            shutil.copyfile(file, path / RESUME / name)
        last = _last_updated(checkpoint, saved.trainer)
        write_num_steps_taken(path / RESUME, last * config.trainer.total_updates_per_step)
    return left_out


def _last_updated(checkpoint: Path, saved: TrainerConfig) -> int:
    """Return the last step that changed the weights; later ones had no samples.

    From it follows when the reference is refreshed. The checkpoint has it as the number of the
    optimizer's steps, which depends on how many updates a step has.
    """
    num_steps_taken = read_num_steps_taken(checkpoint / RESUME)
    if num_steps_taken is None:
        return StageStep.of(checkpoint).step
    return math.ceil(num_steps_taken / saved.total_updates_per_step)


def _deleted(checkpoint: Path, saved: RunConfig, changed: Changed) -> list[str]:
    """Return the names of the state, besides the reference, that a checkpoint had and lost."""
    found = ["the optimizer, which was deleted there"]
    trainer, environments = saved.trainer, saved.environments.values()
    # Without its state, an order of a fixed sequence goes on at step * tasks_per_step.
    orders = [each.env.tasks.order for each in environments]
    learns = any(
        isinstance(order, PythonOrderConfig) or order.startswith("curriculum") for order in orders
    )
    if learns or trainer.max_sampling_rounds > 1 or "trainer.tasks_per_step" in changed:
        found.append("the order of tasks")
    leagues = [each.env.league for each in environments]
    if any(each and StageStep.of(checkpoint).step >= each.every for each in leagues):
        found.append("the league")
    if trainer.replay is not None:
        found.append("the episodes to replay")
    if trainer.max_staleness:
        found.append("the groups played ahead")
    return found


def _copy_frozen_reference(checkpoint: Path, to: Path, saved: RunConfig) -> bool:
    """Copy the reference from the newest checkpoint of the run that has it undamaged, if one does.

    A reference that no step refreshes is the same in all of them. A run that is still training may
    delete them meanwhile.
    """
    if saved.trainer.loss.kl.refresh_every is not None:
        return False
    for other in reversed(all_checkpoints(checkpoint.parents[1])):
        file = other / RESUME / REFERENCE
        try:
            if file.exists():
                shutil.copyfile(file, to / REFERENCE)
                if digest_of_file(to / REFERENCE) == read_digests(file.parent).get(REFERENCE):
                    return True
        except (FileNotFoundError, RunFolderError):
            pass
    (to / REFERENCE).unlink(missing_ok=True)
    return False


def _lost_reference(checkpoint: Path, saved: RunConfig, config: RunConfig) -> list[str]:
    """Return the name of the reference if it was another policy than the checkpoint's weights.

    Before the first step it was not. One that the new run refreshes in its first step is no loss.
    """
    step, before, now = StageStep.of(checkpoint).step, saved.trainer.loss.kl, config.trainer.loss.kl
    is_used = before.has_frozen_policy and now.has_frozen_policy
    is_refreshed = now.refresh_every is not None and step % now.refresh_every == 0
    return [LOST_REFERENCE] if is_used and step and not is_refreshed else []
