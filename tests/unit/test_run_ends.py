"""What a run that ends early leaves in its folder, and what it tells the user to do next."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.pipeline.run import Attempt, RunControl, run
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
from openenv_pipe.runs.folder import RunFolder


class Notes:
    """Records the notes of a run's progress."""

    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)

    def phase(self, text):
        return nullcontext()

    def close(self):
        pass


def end_with(error, folder):
    """Return the last note of a run whose training raises this error."""
    progress = Notes()

    async def training(attempt, control):
        raise error

    with pytest.raises(type(error)):
        run(
            Attempt(folder=folder, config=folder.config_to_run()),
            RunControl(progress=progress),
            training,
        )
    record = RunFolder.open(folder.path).record
    assert (record.status, record.cause) == ("failed", f"{type(error).__name__}: {error}")
    return progress.texts[-1]


def test_a_rejected_run_that_trained_nothing_is_not_to_be_resumed(tmp_path):
    """A resumed run keeps its configuration, so it would be rejected again."""
    folder = run_samples.create(tmp_path)
    note = end_with(ConfigError("trainer.devices=9, expected at most 2"), folder)
    assert "--resume" not in note
    assert "nothing was trained" in note and "start a new run" in note
    assert "--resume" not in (folder.path / "report.md").read_text()


def test_a_rejected_run_with_a_checkpoint_can_be_resumed(tmp_path):
    """The user can repair a reward function that raises at step 10 without changing the
    configuration."""
    folder = run_samples.create(tmp_path)
    with new_checkpoint(folder.path, StageStep("grpo", 10)):
        pass
    note = end_with(ConfigError("reward.terms.it.target raised ValueError"), folder)
    assert f"openenv-pipe train --resume {folder.path}" in note
    assert "--resume" in (folder.path / "report.md").read_text()


def test_a_failed_run_that_trained_nothing_can_be_resumed(tmp_path):
    """The configuration is valid; only the machine failed."""
    folder = run_samples.create(tmp_path)
    note = end_with(HostError("the server did not start"), folder)
    assert f"openenv-pipe train --resume {folder.path}" in note


def test_the_report_of_a_resumed_run_is_not_that_of_its_interruption(tmp_path):
    folder = run_samples.create(tmp_path)
    end_with(HostError("the server did not start"), folder)
    path, texts = folder.path / "report.md", []
    assert "The run is **failed**" in path.read_text()
    folder = RunFolder.open(folder.path)
    config = folder.config_to_run()
    folder.begin_attempt(config, command=[], checkpoint=None, changed={}, differences=[])

    async def training(attempt, control):
        texts.append(path.read_text())

    run(Attempt(folder=folder, config=config), RunControl(progress=Notes()), training)
    assert "The run is **running**, 0 of 2 GRPO steps" in texts[0]
    assert "This page is written anew when it ends." in texts[0]
    assert "The run is **finished**" in path.read_text()


def test_trackers_of_an_extended_run_end_with_its_newest_evaluation(tmp_path, monkeypatch):
    folder = run_samples.create(tmp_path)
    run_samples.evaluate(folder, "trained", 0.2, step=2)
    run_samples.evaluate(folder, "trained", 0.8, step=4)
    ends = []
    trackers = SimpleNamespace(close=lambda status, summary: ends.append(summary))
    monkeypatch.setattr("openenv_pipe.pipeline.run.Trackers", lambda *_: trackers)

    async def training(attempt, control):
        pass

    attempt = Attempt(folder=folder, config=folder.config_to_run())
    run(attempt, RunControl(progress=Notes()), training)
    (summary,) = ends
    assert summary["eval/trained/success"] == 0.8
    assert {name.rpartition("/")[0] for name in summary} == {"eval/trained"}
