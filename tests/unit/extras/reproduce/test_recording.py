"""`reproduce --record`: what a recording keeps of a run."""

import pytest
import run_samples

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.reproduce.recording import record


def test_a_recording_keeps_the_evaluations_of_the_run_alone(tmp_path):
    folder = run_samples.create(tmp_path / "runs")
    run_samples.train(folder, 2)
    own = {"start": 0, "during_000001": 1, "trained": 2, "baseline_random": None}
    for label, step in own.items():
        run_samples.evaluate(folder, label, 0.5, step)
    run_samples.evaluate(folder, "trained", 0.6, 2)  # of a resume
    # what `eval` writes later
    for label, step in (("step_000002", 2), ("untrained", 0), ("baseline_random", None)):
        run_samples.evaluate(folder, label, 0.7, step)
    folder.finish("finished")

    def recorded(name, steps):
        to = tmp_path / name
        record(str(folder.path), to, steps=steps, runs_dir=None)
        return {path.stem for path in (to / "eval").iterdir()}

    assert recorded("all", None) == {*own, "trained_2"}
    assert recorded("first", 1) == {*own} - {"trained"}


def test_a_fork_is_not_recorded_because_a_recording_has_no_weights_to_begin_with(tmp_path):
    whole = run_samples.create(tmp_path / "runs")
    run_samples.train(whole, 2)
    fork = run_samples.create(tmp_path / "runs", lineage=whole.lineage("fork", "step_000001"))
    run_samples.train(fork, 3)
    with pytest.raises(RunFolderError, match="is a fork of smoke/0001@step_000001: it begins with"):
        record(str(fork.path), tmp_path / "recording", steps=None, runs_dir=None)
    assert not (tmp_path / "recording").exists()
