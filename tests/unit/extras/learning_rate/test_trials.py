"""`openenv-pipe lr`: what becomes of a rate whose run fails."""

import pytest
import run_samples

from openenv_pipe import pipeline
from openenv_pipe.errors import TrainingError
from openenv_pipe.extras.learning_rate import trials
from openenv_pipe.extras.learning_rate.request import read_request
from openenv_pipe.pipeline.run import RunControl


@pytest.fixture
def request_of_rates(tmp_path):
    return read_request(["conf=smoke", f"runs_dir={tmp_path}"], "1e-3,1e-2", 2)


def test_a_rate_diverges_while_a_file_is_edited_and_is_a_trial(request_of_rates, monkeypatch):
    """The edit makes another state of the git checkout than that in which the run began."""

    def train(composed, command, control):
        folder = run_samples.create(request_of_rates.config.runs_dir, composed.config)
        folder.finish("failed", cause="TrainingError: it diverged")
        monkeypatch.setattr(trials, "find_checkouts", lambda code: [])
        raise TrainingError("it diverged")

    monkeypatch.setattr(pipeline, "train", train)
    found = trials.run_trials(request_of_rates, ["openenv-pipe"], RunControl())
    assert [each.lr for each in found] == [1e-3, 1e-2]
    assert all("it diverged" in each.failure for each in found)


def test_an_error_before_there_is_a_run_is_raised(request_of_rates, monkeypatch):
    def train(composed, command, control):
        raise TrainingError("no weights")

    monkeypatch.setattr(pipeline, "train", train)
    with pytest.raises(TrainingError, match="no weights"):
        trials.run_trials(request_of_rates, ["openenv-pipe"], RunControl())
