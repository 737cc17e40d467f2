"""A sweep asks for its model before it makes a folder."""

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps import command as sweep_command
from openenv_pipe.extras.sweeps.cli import SweepSignals, SweepTable
from openenv_pipe.models import hub


def test_a_sweep_without_its_model_ends_before_it_has_a_folder(tmp_path, monkeypatch):
    """With one error, also of many jobs, whose models are asked for once."""
    asked = []

    def reject(config):
        asked.append(config.path)
        raise ConfigError(f"model.path={config.path!r} cannot be had")

    monkeypatch.setattr(hub, "reject_unreachable", reject)
    words = ["conf=echo", f"runs_dir={tmp_path}", "model=hub", "seed=range(0,9)"]
    for path, said in ((None, r"model\.path"), ("some/model-of-no-hub", "cannot be had; set it")):
        chosen = words if path is None else [*words, f"model.path={path}"]
        with pytest.raises(ConfigError, match=said):
            sweep_command.sweep(chosen, [], SweepTable(), SweepSignals(print))
    assert asked == ["some/model-of-no-hub"] and list(tmp_path.iterdir()) == []
