"""A run as a program sees it: `Run` reads a run folder, while the run goes on or afterwards."""

import os
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.registry import extras, load
from openenv_pipe.runs.episodes import episodes_path, read_recorded_episodes
from openenv_pipe.runs.evals import during_by_name, eval_episodes_path, place_of, read_reports
from openenv_pipe.runs.find import find_run, find_weights
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.runs.notebook import Episodes, EvalReports, Metrics
from openenv_pipe.system.user_modules import current_modules
from openenv_pipe.system.user_numbers import shown, whole_number
from openenv_pipe.types import Message, Observation

if TYPE_CHECKING:
    from openenv_pipe.models.policy import Policy


class Run:
    """One run. Everything but `path` and `id` is read from its folder each time it is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises RunFolderError if `path` is not a run folder."""
        folder = RunFolder.open(Path(path))
        self.path = folder.path
        self.id = folder.record.id  # "wordle/0007"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, status={self.status!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows: status, evaluations with their intervals, and the curves so far.

        The curves are drawn anew: the report, which also has them, is written when the run ends.
        """
        drawn = [load(each.curves)(self._folder) for each in extras() if each.curves]
        images = (
            f'<img alt="learning curves" src="data:image/png;base64,{b64encode(png).decode()}">'
            for png in drawn
            if png
        )
        title = f"<p><b>{escape(self.id)}</b> {escape(self.status)}</p>"
        return "".join([title, self.evals._repr_html_(), *images])

    @property
    def status(self) -> str:
        """`running`, `finished`, `failed`, `interrupted`, or `died` if its process is gone."""
        return self._folder.status

    @property
    def cause(self) -> str | None:
        """Why the run ended early, in a sentence; None if it did not."""
        return self._folder.record.cause

    @property
    def config(self) -> RunConfig:
        """The configuration as it was written, without secrets."""
        return self._folder.written_config

    @property
    def metrics(self) -> Metrics:
        """The metrics of every step, the warm start's first. Empty before the first step."""
        return Metrics(read_metrics(self._folder.metrics_path))

    @property
    def evals(self) -> EvalReports:
        """The evaluations by label, in order of their steps: `start`, `during_000010`, `trained`.

        After these come those of `eval` and of the baselines. A second evaluation of the same label
        has a number: `trained_2`. Of those between steps, only the newest of a step is here.
        """
        found = read_reports(self.path) | during_by_name(self.path)
        return EvalReports((label, found[label]) for label in sorted(found, key=place_of))

    @property
    def report(self) -> Path:
        """The page about the run, written when it ends. Raises RunFolderError before that."""
        path = self.path / "report.md"
        if not path.exists():
            raise RunFolderError(f"{path} does not exist yet: it is written when the run ends")
        return path

    def episodes(self, of: SupportsIndex | str) -> Episodes:
        """The groups of episodes that a GRPO step learned from, or those of an evaluation.

        of: a step, where 0 stands for the demonstrations, or the label of one of `evals`.
        Raises RunFolderError if the run has no such episodes.
        """
        step, path = whole_number(of), None
        if step is not None:
            path = episodes_path(self.path, step)
        elif isinstance(of, str) and (report := self.evals.get(of)):
            path, step = eval_episodes_path(self.path, of), report.step
        if path is None or not path.exists():
            labels = ", ".join(self.evals) or "none yet"
            raise RunFolderError(
                f"{self.path} has no episodes of {of!r}; give a step of GRPO from 1 on, 0 for the "
                f"demonstrations, or the label of an evaluation: {labels}"
            )
        return Episodes(read_recorded_episodes(path), step)

    def messages(self, observation: Observation, *, trust: bool = False) -> list[Message]:
        """The messages with which the run's adapter begins an episode, made of an observation.

        observation: what the environment's reset returns, such as `{"question": "5 + 7 ="}`; that
            of an episode is its `first_observation`.
        trust: as for `load_policy`.
        Raises RunFolderError, and ConfigError if the observation is no dictionary, a template needs
        another field, or the adapter has to ask an environment.
        """
        from openenv_pipe.environments.adapters import opening_messages

        if not isinstance(observation, Mapping):
            raise ConfigError(
                f"{shown(observation)} is no observation: expected a dictionary of its fields, as "
                'in run.messages({"question": "5 + 7 ="}); the `first_observation` of an episode '
                "has them"
            )
        config = self._folder.config_to_run(trust=trust, secrets_of=["env"])
        with current_modules():
            return opening_messages(config.env.adapter, observation)

    def checkpoint(self, which: SupportsIndex | str = "last") -> Path:
        """The folder of a checkpoint: `last`, `best`, or that of a GRPO step.

        Raises RunFolderError if it does not exist, or its files are damaged.
        """
        found = find_weights(self._folder, _checkpoint_name(which))
        if found is None:
            raise RunFolderError(
                f"{self.path}@start is the model before training, of which the run has no folder; "
                f"load_policy('start') loads it, and export('{self.path}@start') writes it"
            )
        return found

    def load_policy(
        self, which: SupportsIndex | str = "last", *, device: str = "auto", trust: bool = False
    ) -> "Policy":
        """Load the model of a checkpoint, with its tokenizer. Imports torch.

        which: as for `checkpoint`, or `start`: the model before training.
        device: `auto`, `cpu` or `cuda`. trust: accept a folder that another user made, or that was
        changed since. Raises RunFolderError and ConfigError.
        """
        from openenv_pipe.models.load import load_policy, select_device

        folder = self._folder
        config = folder.config_to_run(trust=trust, secrets_of=["model"])
        return load_policy(
            config.model,
            seed=config.seed,
            device=select_device(device),
            checkpoint=find_weights(folder, _checkpoint_name(which)),
            max_tokens=config.max_episode_tokens,
        )

    @property
    def _folder(self) -> RunFolder:
        return RunFolder.open(self.path)


def _checkpoint_name(which: SupportsIndex | str) -> str:
    step = whole_number(which)
    if step is not None:
        return str(step)
    return "" if which == "last" else str(which)


def open_run(name: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """An existing run by its folder, its id such as `wordle/0007`, or `latest`.

    runs_dir: where ids and `latest` are looked up; default: where the commands look them up.
    Raises RunFolderError.
    """
    return Run(find_run(os.fspath(name), None if runs_dir is None else Path(runs_dir)).path)
