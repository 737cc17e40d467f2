"""Find a run by the names that users give it: a folder, an id such as wordle/0007, `latest`.

All commands look runs up here, in the same folders (`runs_folders`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from openenv_pipe.config.compose import parse_overrides
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import StageStep, find_checkpoint, fork_origin
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.places import MAKES_FIRST_RUN, runs_folders

# The blocks that an evaluation uses, whose secrets it needs.
PLAYED = ("env", "host", "reward", "judge", "agent", "model", "engine", "cluster", "beside")
START = "start"  # RUN@start: the model before training
AT_START = "untrained"  # the label of RUN@start; `start` belongs to the run's own first stage


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedModel:
    """A run's policy at one of its checkpoints, or at the start of training."""

    folder: RunFolder
    config: RunConfig
    checkpoint: Path | None
    label: str  # of its eval report
    step: int | None  # GRPO steps; None for a model that no run trains

    @property
    def name(self) -> str:
        return f"{self.folder.record.id} {self.label}"

    @property
    def checkpoint_name(self) -> str:
        return START if self.checkpoint is None else self.checkpoint.name


def find_run(name: str, runs_dir: Path | None = None) -> RunFolder:
    """Open the run; `latest` is the newest of all, and EXPERIMENT/latest that of an experiment.

    Runs that only evaluate, and reproductions, are the newest only where there are no others, and
    unfinished ones of these come last.

    runs_dir: where ids and `latest` are looked up; None: in all of `runs_folders`.

    Raises RunFolderError: There is no such run, or several folders have one of that id.
    """
    return RunFolder.open(find_folder(name, runs_dir))


def find_folder(name: str, runs_dir: Path | None = None) -> Path:
    """Return the folder of a run or a sweep.

    runs_dir: as for `find_run`. Raises RunFolderError if no folder has it, or several have.
    """
    folders = runs_folders(runs_dir)
    if name == "latest":
        return _newest(folders)
    if Path(name).is_dir():
        return Path(name)
    found = [folder / name for folder in folders if (folder / name).is_dir()]
    if len(found) > 1 and name.endswith("/latest"):
        return max(map(RunFolder.open, found), key=_place_among_latest).path
    if len(found) > 1:
        raise RunFolderError(
            f"{name} is ambiguous: {' and '.join(map(str, found))} exist; name one of these "
            "folders, or choose with --runs-dir"
        )
    if not found:
        raise RunFolderError(
            f"no folder {name}, neither here nor in {' or '.join(map(str, folders))}; "
            "`openenv-pipe runs` lists the runs, and --runs-dir names another folder of runs"
        )
    return found[0]


def is_sweep(path: Path) -> bool:
    """True for the folder of a sweep, also of one whose sweep.json is gone."""
    return (path / "sweep.json").is_file() or (
        path.is_dir() and path.parent.name == "sweeps" and not (path / "run.json").exists()
    )


def is_run(word: str, runs_dir: Path | None = None) -> bool:
    """True for a folder, an id or `latest`, with or without a checkpoint: RUN, RUN@40."""
    names = {word, word.rpartition("@")[0]} - {""}
    folders = [Path(), *runs_folders(runs_dir)]
    return any(
        name == "latest" or any((folder / name).is_dir() for folder in folders) for name in names
    )


def split_checkpoint(word: str) -> tuple[str, str]:
    """Return the run and the checkpoint that `RUN@CHECKPOINT` names; "" if it names none.

    A folder may have an `@` in its name.
    """
    path, at, which = word.rpartition("@")
    return (word, "") if not at or Path(word).is_dir() else (path, which)


def find_weights(folder: RunFolder, which: str) -> Path | None:
    """Return the checkpoint that a user names, as `find_checkpoint`; None for `start`.

    `start` is the model before training; for a fork, it is the checkpoint that the fork began with.
    Raises RunFolderError.
    """
    if which == START:
        origin = fork_origin(folder.record)
        if origin is None:
            return None
        which = origin.name
    return find_checkpoint(folder.path, which, others=[START])


def split_runs_dir(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the folder that `runs_dir=DIR` names, if there is one, and the other overrides.

    `++runs_dir=DIR` is the same to Hydra, and so it is here.

    Raises ConfigError if it cannot be read.
    """
    named = [each for each in overrides if each.lstrip("+").startswith("runs_dir=")]
    others = [each for each in overrides if each not in named]
    return (Path(str(parse_overrides(named)[-1].value())) if named else None), others


def _newest(folders: Sequence[Path]) -> Path:
    found = []
    for record in (each for folder in folders for each in folder.glob("*/[0-9]*/run.json")):
        try:
            found.append(RunFolder.open(record.parent))
        except RunFolderError:
            # `openenv-pipe runs` shows it as unreadable.
            continue
    if not found:
        raise RunFolderError(
            f"there is no run in {' or '.join(map(str, folders))}; {MAKES_FIRST_RUN}; or name a "
            "run's folder, or the folder of all runs with --runs-dir"
        )
    return max(found, key=_place_among_latest).path


def _place_among_latest(run: RunFolder) -> tuple[bool, bool, datetime]:
    """Return the sort key by which the last run is the latest."""
    is_training = run.record.is_training
    return is_training, is_training or run.status == "finished", run.record.created


def find_model(
    word: str,
    overrides: Sequence[str] = (),
    *,
    runs_dir: Path | None = None,
    trust: bool = False,
    secrets_of: Collection[str] | None = None,
) -> SelectedModel:
    """Find the run and checkpoint of `RUN`, `RUN@40`, `RUN@best` or `RUN@start`, to act on them.

    Without `@`, it is the newest sound checkpoint; `start` of a fork is the one that it began with.
    `overrides` change the run's configuration. The label names the agent's type if the run was
    trained with another type.
    runs_dir: as for `find_run`.
    trust: accept a folder that another user made, or that was changed since.
    secrets_of: as for `RunFolder.config_to_run`.

    Raises:
        RunFolderError: The run or the checkpoint does not exist, or the folder is not trusted.
        ConfigError: An override is wrong.
    """
    path, which = split_checkpoint(word)
    folder = find_run(path, runs_dir)
    config = folder.config_to_run(overrides, trust=trust, secrets_of=secrets_of)
    agent = config.agent.type
    other = f"_{agent}" if agent != folder.written_config.agent.type else ""
    if not config.engine.capabilities.can_train:  # It needs no checkpoint.
        label = config.engine.type + other
        return SelectedModel(folder=folder, config=config, checkpoint=None, label=label, step=None)
    checkpoint = find_weights(folder, which)
    label = (checkpoint.name if checkpoint else AT_START) + other
    place = StageStep.of(checkpoint) if checkpoint else None
    step = place.step if place and place.stage == "grpo" else 0
    return SelectedModel(
        folder=folder, config=config, checkpoint=checkpoint, label=label, step=step
    )
