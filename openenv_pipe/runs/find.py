"""Find a run by the names that users give it: a folder, an id such as wordle/0007, `latest`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.compose import amend
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import StageStep, find_checkpoint
from openenv_pipe.runs.folder import RunFolder

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


def find_run(name: str, runs_dir: Path) -> RunFolder:
    """Open the run; `latest` is the newest in `runs_dir`. Raises RunFolderError."""
    if name == "latest":
        return _newest(runs_dir)
    if not Path(name).is_dir() and (runs_dir / name).is_dir():
        return RunFolder.open(runs_dir / name)
    return RunFolder.open(name)


def _newest(runs_dir: Path) -> RunFolder:
    found = []
    for record in runs_dir.glob("*/[0-9]*/run.json"):
        try:
            found.append(RunFolder.open(record.parent))
        except RunFolderError:
            continue  # `openenv-pipe runs` shows it as unreadable.
    if not found:
        raise RunFolderError(f"there is no run in {runs_dir}; name a run's folder")
    return max(found, key=lambda folder: folder.record.created)


def find_model(word: str, overrides: Sequence[str], *, trust: bool = False) -> SelectedModel:
    """Find the run and checkpoint of `RUN`, `RUN@40`, `RUN@best` or `RUN@start`, to act on them.

    Without `@`, it is the newest sound checkpoint. `overrides` change the run's configuration. The
    label names the agent if it is not the type of agent that the run was trained with.
    trust: also of a run whose folder another user made, or that was changed since.

    Raises:
        RunFolderError: The run or the checkpoint does not exist, or the folder is not trusted.
        ConfigError: An override is wrong.
    """
    path, at, which = word.rpartition("@")
    if not at or Path(word).is_dir():
        path, which = word, ""
    folder = find_run(path, Path("runs"))
    own = folder.config_to_run(trust=trust)
    config = amend(own, overrides)
    other = f"_{config.agent.type}" if config.agent.type != own.agent.type else ""
    if not config.engine.capabilities.can_train:  # It needs no checkpoint.
        label = config.engine.type + other
        return SelectedModel(folder=folder, config=config, checkpoint=None, label=label, step=None)
    if which == "start":
        label = AT_START + other
        return SelectedModel(folder=folder, config=config, checkpoint=None, label=label, step=0)
    checkpoint = find_checkpoint(folder.path, which)
    place = StageStep.of(checkpoint)
    return SelectedModel(
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        label=checkpoint.name + other,
        step=place.step if place.stage == "grpo" else 0,
    )
