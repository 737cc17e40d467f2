"""`check` against real servers: what it finds, and that it leaves nothing behind."""

import json
import tempfile

import psutil
import pytest
import torch
from safetensors.torch import save_file

from openenv_pipe.commands.findings import Line, Result, as_table, has_failed
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.check.checks import TRIALS, run_checks
from openenv_pipe.models.memory_estimate import read_folder_shape


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Assert that no file, here or in the temporary folder, and no process is left."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # importing torch creates this folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list((tmp_path / "folder").iterdir()) == []
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def check(*overrides: str) -> dict[str, Line]:
    config = compose(["host.sessions_per_server=4", "device=cpu", *overrides]).config
    lines = run_checks(config)
    assert has_failed(lines) == any(line.result is Result.FAIL for line in lines)
    assert len(as_table(lines).rows) == len(lines)
    return {line.name: line for line in lines}


def test_a_shipped_experiment_passes():
    lines = check("conf=wordle", "trainer.tasks_per_step=3", "trainer.group_size=2")
    assert {name for name, line in lines.items() if line.result is not Result.OK} == set()
    assert set(lines) == {
        *("settings", "device", "run folder", "model", "learning rate", "chat", "environment"),
        *("adapter", "rewards", "policies", "servers", "sessions", "seeds", "tasks", "memory"),
        *("disk", "forward", "tokens", "baseline expert", "baseline random"),
        *("reward consistent", "reward respected"),
    }
    assert "4 opened; the 6 episodes" in lines["sessions"].text


def test_problems_of_several_kinds_are_all_told():
    lines = check(
        "conf=wordle",
        "env.package=wordel",
        "env.adapter.pattern='('",
        "model=hub",
        "model.path=no such model",
    )
    assert {name for name, line in lines.items() if line.result is Result.FAIL} == {
        *("adapter", "environment", "model"),
    }
    assert "did you mean wordle" in lines["environment"].text


def test_a_server_that_dies_is_shown_with_its_last_words():
    command = "env.command=[python3,-c,'print(\"no flour\"); raise SystemExit(3)']"
    line = check("conf=echo", command)["environment"]
    assert line.result is Result.FAIL
    assert "no flour" in line.text
    assert "/temporary/" not in line.text


def test_tasks_that_are_all_the_same_are_warned_about():
    lines = check("conf=wordle", "env.tasks.train.index_key=null", "env.tasks.train.num_tasks=2")
    assert lines["seeds"].result is Result.OK  # the seed decides the task where no index does
    reset = "{index: 3}"
    lines = check("conf=wordle", "env.tasks.train.index_key=null", f"env.tasks.train.reset={reset}")
    assert lines["tasks"].result is Result.WARN


def test_a_template_that_names_a_missing_field_fails():
    line = check("conf=echo", "env.adapter.first='{{ lettre }}'")["environment"]
    assert line.result is Result.FAIL
    assert "lettre" in line.text


def test_what_does_not_fit_into_memory_fails():
    tokens = ("trainer.tokens_per_batch=1000000000", "trainer.tasks_per_step=100000")
    line = check("conf=wordle", *tokens)["memory"]
    assert line.result is Result.FAIL
    assert "trainer.tokens_per_batch" in line.text


def test_the_shape_of_a_model_folder(tmp_path):
    values = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = {"a": torch.zeros(99, 32), "b": torch.zeros(32)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = compose(["conf=smoke", "model=hub", f"model.path={tmp_path}"]).config.model
    shape = read_folder_shape(model, tmp_path)
    assert (shape.num_parameters, shape.cache_width) == (99 * 32 + 32, 16)


def test_a_tracker_that_cannot_be_built_is_told():
    config = compose(["conf=echo", "tracker=python", "tracker.python.target=builtins:dict"]).config
    with pytest.raises(ConfigError, match=r"tracker\.python\.target='builtins:dict'"):
        list(TRIALS["tracker"][0](config))
