"""Mixtures of experts: their adapters, merged and exported, and the balance of their routers."""

import pytest
import torch
import transformers
from fakes import loss_and_gradients, random_samples

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.adapter import describe_adapter
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.forward.router_balance import balance_loss, recorded_routing
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline.requirements import REQUIREMENTS
from tests import families
from tests.families import family_policy, family_run, make_family

PROMPT = list(range(3, 40))
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "Qwen3MoeConfig": families.EXPERTS,
    "Qwen2MoeConfig": families.EXPERTS | {"shared_expert_intermediate_size": 32},
    "MixtralConfig": LOCAL,
    "GptOssConfig": LOCAL | {"layer_types": 2 * ["full_attention"]},
    "OlmoeConfig": families.EXPERTS,
    "GraniteMoeConfig": LOCAL,
    "DeepseekV2Config": families.ROUTED | families.LATENT,
    "DeepseekV3Config": families.DEEPSEEK,
    "Glm4MoeConfig": families.ROUTED,
    "Ernie4_5_MoeConfig": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "MiniMaxM2Config": LOCAL,
    "Llama4TextConfig": LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 128},
}
ROUTERS = ("gate", "router", "wg")


@pytest.mark.parametrize("family", MIXTURES)
def test_an_adapter_computes_the_same_when_it_is_merged_and_exported(family, tmp_path):
    folder = make_family(tmp_path / "model", family, **MIXTURES[family])
    policy = family_policy(folder, "model.lora.rank=2")
    adapted, _, left_out = describe_adapter(policy.model).partition("; none: ")
    assert any(f"{name} " in left_out for name in ROUTERS)
    assert not any(f" {name} " in adapted for name in ROUTERS)

    publication = PolicyWeights(policy)
    expected = torch.from_numpy(publication.next_logprobs([PROMPT], 1.0))[0]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    publication.write_weights(tmp_path / "merged")
    merged, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.inference_mode():
        logits, without = (each(torch.tensor([PROMPT])).logits[0, -1] for each in (merged, plain))
    torch.testing.assert_close(torch.log_softmax(logits, -1), expected, atol=1e-4, rtol=0)
    assert (torch.log_softmax(without, -1) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("packs_rows", [True, False])
@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "MixtralConfig", "GptOssConfig"])
def test_the_balance_of_routers_is_that_of_transformers(family, packs_rows, tmp_path):
    folder = make_family(tmp_path, family, **MIXTURES[family])
    policy = family_policy(folder)
    check_forward(policy)
    policy.packs_rows = policy.packs_rows and packs_rows
    batch = pack(random_samples(0), share=False, device=policy.device)
    with recorded_routing(policy.decoder) as routing:
        policy.logprobs(batch, 1.0)
    found = balance_loss(policy.decoder, routing, batch)

    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = [batch.token_ids[node.start : node.end] for node in batch.nodes]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ones = [torch.ones_like(row) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    with torch.inference_mode():
        expected = own(ids, attention_mask=mask, output_router_logits=True).aux_loss
    assert found.item() == pytest.approx(expected.item(), abs=1e-4)
    found.backward()
    routers = [
        each for name, each in policy.trained_parameters() if "router" in name or ".gate." in name
    ]
    assert routers and all(each.grad.abs().max() > 0 for each in routers)


def test_the_coefficient_adds_the_balance_to_the_loss(tmp_path):
    policy = family_policy(make_family(tmp_path, "MixtralConfig", **LOCAL))
    samples = random_samples(0)
    without, gradients = loss_and_gradients(policy, samples, {"tokens_per_batch": 4096})
    changes = {"tokens_per_batch": 4096, "loss.router_aux_coef": 0.5}
    with_balance, moved = loss_and_gradients(policy, samples, changes)
    assert with_balance - without >= 0.5  # the least loss is that of perfect balance
    assert any(not torch.equal(*pair) for pair in zip(gradients, moved, strict=True))


@pytest.mark.parametrize("family", ["Qwen3Config", "DeepseekV3Config", "Llama4TextConfig"])
def test_a_model_without_routers_or_without_this_loss_is_rejected(family, tmp_path):
    """Llama 4 has a coefficient, but no loss."""
    folder = make_family(tmp_path, family, **MIXTURES.get(family, {}))
    run = family_run(folder, "trainer.loss.router_aux_coef=0.01")
    with pytest.raises(ConfigError, match=r"router_aux_coef=0\.01: .* set .*router_aux_coef=0"):
        REQUIREMENTS["model"](run)
    with pytest.raises(ConfigError, match="has no load-balancing loss"):
        Learner(family_policy(folder), run.trainer, max_episode_tokens=64, seed=0)
