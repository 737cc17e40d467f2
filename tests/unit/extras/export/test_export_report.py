"""An export is compared with the policy that was trained, and lacks memory in its own words."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from openenv_pipe.errors import OutOfMemoryError, TrainingError
from openenv_pipe.extras.export import command
from openenv_pipe.extras.export.command import PROBES, _compare, export_run
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.runs.find import SelectedModel
from tests.vllm_server import small_config, small_policy


def test_an_export_that_computes_something_else_fails(tmp_path):
    publication = PolicyWeights(small_policy(small_config()))
    publication.write_weights(tmp_path)
    prompts = [list(range(1, num + 1)) for num in PROBES]
    expected = publication.next_logprobs(prompts, 1.0)
    assert _compare(tmp_path, prompts, expected, 1e-4) < 1e-4
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = torch.randn_like(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(TrainingError, match="logprobs differ from the policy's by"):
        _compare(tmp_path, prompts, expected, 1e-4)


def test_a_lack_of_memory_ends_with_advice_for_the_export(tmp_path, monkeypatch):
    def find_model(*words, **options):
        record = SimpleNamespace(id="smoke/0001")
        folder = SimpleNamespace(path=tmp_path, record=record)
        config = small_config()
        return SelectedModel(
            folder=folder, config=config, checkpoint=tmp_path / "step_1", label="step_1", step=1
        )

    def load_policy(*arguments, **options):
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(command, "find_model", find_model)
    monkeypatch.setattr(command, "load_policy", load_policy)
    with pytest.raises(OutOfMemoryError, match=r"in exporting the model: .*on the CPU"):
        export_run("smoke/0001", tmp_path / "model", trust=True, notify=print)
    assert not (tmp_path / "model").exists()
