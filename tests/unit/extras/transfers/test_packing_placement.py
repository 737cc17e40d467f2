"""On which device weights of a policy on a GPU are packed: where they are."""

import pytest
from fakes import CPU, tiny_model

from openenv_pipe.extras.transfers.link import buffer_for, device_of, divide, fill
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.weights import PolicyWeights
from tests.unit.test_device_placement import on_gpu, pretended_gpu


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_weights_are_packed_where_they_are(lora_rank):
    policy = load_policy(tiny_model(lora_rank=lora_rank), seed=0, device=CPU)
    with pretended_gpu():
        weights = PolicyWeights(on_gpu(policy)).tensors()
        chunks = divide(weights, 10_000)
        buffer = buffer_for(chunks, device_of(weights))
        parts = [fill(buffer, chunk, weights) for chunk in chunks]
        assert {part.device.type for part in parts} == {"cuda"}
        assert sum(part.numel() for part in parts) == sum(each.nbytes for each in weights.values())
