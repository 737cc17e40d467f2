"""The published weights of a policy are the same in memory and in files."""

import pytest
import torch
from safetensors.torch import load_file

from openenv_pipe.models.weights import Publication
from tests.vllm_server import small_config, small_policy


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_are_those_of_the_files_and_an_adapter_is_merged_into_them(tmp_path, rank):
    policy = small_policy(small_config(f"model.lora.rank={rank}"))
    draw = torch.Generator().manual_seed(3)
    for _, parameter in policy.trained_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    before = {name: values.clone() for name, values in policy.model.state_dict().items()}
    publication = Publication(policy)
    publication.write_base(tmp_path / "base")
    publication.write_weights(tmp_path / "written")

    weights, written = publication.weights(), load_file(tmp_path / "written/model.safetensors")
    base = load_file(tmp_path / "base/model.safetensors")
    assert weights.keys() == written.keys() == base.keys()
    assert all(torch.equal(weights[name], written[name]) for name in written)
    changed = {name for name in base if not torch.equal(base[name], written[name])}
    assert bool(changed) == bool(rank)
    assert all("proj" in name for name in changed)
    after = policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
