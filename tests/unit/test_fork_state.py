"""What a fork takes over from a checkpoint, and what it names as left out."""

import pytest
import run_samples
from fakes import run_config

from openenv_pipe.config.compose import amend
from openenv_pipe.pipeline.league import LEAGUE
from openenv_pipe.pipeline.source_state import ORDER
from openenv_pipe.pipeline.start import _changes, _copy_checkpoint

SECRET = "abcdef-0123456789-abcdef"
LEFT = "the optimizer, which was deleted there"


@pytest.mark.parametrize(
    ("every", "is_resumable", "changed", "left_out"),
    [
        (2, False, {}, [LEFT, "the league"]),
        (9, False, {}, [LEFT]),  # nothing had joined
        (None, False, {}, [LEFT]),
        (2, True, {}, []),
        (2, True, {"seed": [0, 5]}, ["the order of tasks"]),
        (2, True, {"env.players.league.size": [2, 3]}, ["the league"]),
    ],
)
def test_a_fork_names_the_league_if_it_is_lost(tmp_path, every, is_resumable, changed, left_out):
    league = {"every": every, "size": 2, "share": 0.5} if every else None
    roles = {"x": "policy", "o": "policy"}
    players = {"roles": roles, "turn": "turn", "rewards": "rewards", "league": league}
    checkpoint = tmp_path / "step_000004"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").touch()
    if is_resumable:
        (checkpoint / "resume").mkdir()
        for name in (ORDER, LEAGUE):
            (checkpoint / "resume" / name).touch()
    config = run_config({"env.players": players})
    assert _copy_checkpoint(checkpoint, tmp_path / "fork", config, changed) == left_out
    (copied,) = tmp_path.glob("fork/checkpoints/step_000004/resume")
    kept = {path.name for path in copied.iterdir()}
    assert (LEAGUE in kept) == (is_resumable and "the league" not in left_out)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_secret_that_a_resume_or_fork_replaces_is_not_asked_for(tmp_path, monkeypatch, is_set):
    """One that is given again as it was is no change, if the environment has it too."""
    key = f"env.variables.API_TOKEN={SECRET}"
    tracker = ["tracker=otlp", f"+tracker.otlp.headers.api_key={SECRET}-2"]
    folder = run_samples.create(tmp_path, amend(run_samples.config(tmp_path), [key, *tracker]))
    if is_set:
        monkeypatch.setenv("API_TOKEN", SECRET)
    config = folder.config_to_run([key, "tracker=none"])
    assert config.env.variables["API_TOKEN"] == SECRET
    keys = _changes(folder, config).keys()
    assert "tracker.otlp.type" in keys and ("env.variables.API_TOKEN" in keys) is not is_set
