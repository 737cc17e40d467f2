"""What only a GPU can show; skipped without one. Run by `benchmarks/gpu_acceptance.py`."""

import numpy as np
import pytest
import torch
from fakes import CPU, alike_samples, run_config, tiny_model

from openenv_pipe.algorithms.prefix_tree import flat
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models.forward.attention.flex import flex
from openenv_pipe.models.forward.attention.packed import PackedRow, each_alone
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.load import load_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of what torch itself does
]


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_an_update_is_that_of_a_cpu(lora_rank):
    """With packed rows and shared prefixes, by FlexAttention's compiled kernel."""
    config = run_config({"model": tiny_model(lora_rank=lora_rank).model_dump()})
    seen = []
    for device in (CPU, torch.device("cuda")):
        policy = load_policy(config.model, seed=0, device=device)
        assert check_forward(policy) is None
        metrics = Devices(config, device).learner(policy).update(alike_samples(1, count=5), 1)
        seen.append([metrics[key] for key in ("loss/policy", "grad/norm", "tokens/trained")])
    assert seen[1] == pytest.approx(seen[0], rel=1e-3, abs=1e-5)


def test_long_samples_alone_attend_as_in_their_row():
    """torch's own kernel for samples that share nothing, and FlexAttention's for any row."""
    nodes = flat([np.arange(length) for length in (1500, 700)]).nodes
    row = PackedRow(nodes, torch.device("cuda"), 1500)
    assert row.lengths == [1500, 700]
    given = [
        torch.randn(1, heads, 2200, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    ]
    one = each_alone(*given, row.lengths, 0.125)
    assert torch.allclose(one, flex(*given, row.block_mask, 0.125), atol=2e-2)
