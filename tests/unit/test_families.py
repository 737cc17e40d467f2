"""Each model family is computed as transformers computes it, or `check` and `train` reject it with
the same message."""

import pytest
import torch
import transformers
from fakes import random_samples

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.check.checks import try_forward
from openenv_pipe.extras.report.sections import model_rows
from openenv_pipe.models.adapter import describe_adapter
from openenv_pipe.models.forward.architecture_check import reject_unsupported
from openenv_pipe.models.forward.attention import packed
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.forward.row_forward import Sampler, find_reaches, layer_masks
from openenv_pipe.models.load import check_architecture, load_policy, load_tokenizer
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline.facts import policy_facts
from tests import families
from tests.families import (
    SIZES,
    engine_difference,
    family_policy,
    family_run,
    learner_difference,
    make_family,
)

FULL = ["full_attention", "full_attention"]
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
QWEN_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CHUNKS = {
    **EXPERTS,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 128,
    "attention_chunk_size": 16,
    "no_rope_layers": [1, 0],
    "floor_scale": 16,
    "layer_types": ["chunked_attention", "full_attention"],
}
MINIMAX = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 4,
    "block_size": 16,
}
# Of each kind of layer: a family, and how it is sampled.
SAMPLED = {
    "a window": ("MistralConfig", {"sliding_window": 16}, Sampler.RAGGED),
    "windows and full": ("Gemma3TextConfig", MIXED, Sampler.RAGGED),
    "sinks": ("GptOssConfig", {**EXPERTS, **MIXED}, Sampler.RAGGED),
    "capped scores": (
        "Gemma2Config",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
        Sampler.RAGGED,
    ),
    "convolutions": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, Sampler.PLAIN),
    "a recurrent state": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}, Sampler.PLAIN),
    "gated deltas": ("Qwen3_5TextConfig", QWEN_DELTA, Sampler.PLAIN),
    "chunks and scales by position": ("Llama4TextConfig", CHUNKS, Sampler.PLAIN_EQUAL),
    "a cache of its own": ("MiniMaxConfig", MINIMAX, Sampler.WHOLE),
}


def test_attention_to_later_tokens_is_rejected_by_check_and_train(tmp_path):
    run = family_run(make_family(tmp_path, "BertConfig"))
    said = []
    for use in (
        lambda: check_architecture(run),
        lambda: load_policy(run.model, seed=0, device=torch.device("cpu")),
    ):
        with pytest.raises(ConfigError, match="not causal") as caught:
            use()
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(("config", "options", "sampler"), SAMPLED.values(), ids=SAMPLED)
def test_each_kind_of_layer_is_sampled_and_trained_as_transformers_computes_it(
    config, options, sampler, tmp_path
):
    """Rows are longer than two windows or chunks."""
    folder = make_family(tmp_path, config, **options)
    policy = family_policy(folder)
    assert check_forward(policy) is not None
    assert policy.sampler is sampler
    assert not policy.packs_rows
    assert engine_difference(policy, folder, [61, 23, 40]) < 1e-4
    assert learner_difference(policy, folder) < 1e-4


def test_check_and_report_say_how_a_model_is_computed_and_why(tmp_path):
    run = family_run(make_family(tmp_path, "Qwen3_5TextConfig", **QWEN_DELTA))
    (line,) = try_forward(run)
    assert line.text.startswith("trained in padded rows (its recurrent layers keep a state); ")
    assert "sampling is plain (not fast: " in line.text
    assert "not ragged: its recurrent layers keep a state" in line.text

    policy = load_policy(run.model, seed=0, device=torch.device("cpu"))
    check_forward(policy, run.env.max_episode_tokens)
    text = model_rows(run, policy_facts(policy))["forward passes"]
    assert text.startswith("trained in padded rows, plain sampling (")
    assert "not ragged: its recurrent layers keep a state" in text


def test_a_window_as_long_as_episodes_is_trained_in_packed_rows(tmp_path):
    policy = family_policy(make_family(tmp_path, "MistralConfig", sliding_window=30))
    assert check_forward(policy, max_tokens=30) is None
    assert "sliding_window=30, and rows have 31 tokens" in check_forward(policy, max_tokens=31)


def test_chunks_of_any_row_begin_at_its_own_positions():
    reaches = find_reaches(transformers.Llama4TextConfig(**SIZES | CHUNKS))
    positions = torch.tensor([[14, 15, 16], [31, 32, 33]])
    causal = (torch.arange(34) <= positions[:, :, None])[:, None]
    masks = layer_masks(reaches, causal, positions)
    assert torch.equal(masks["full_attention"], causal)
    first_seen = masks["chunked_attention"].int().argmax(-1)[:, 0]
    assert first_seen.tolist() == [[0, 0, 16], [16, 32, 32]]


@pytest.mark.parametrize("config", ["DeepseekV2Config", "DeepseekV3Config"])
def test_values_of_another_size_than_keys_are_cached_and_trained_in_padded_rows(config, tmp_path):
    folder = make_family(tmp_path, config, **families.DEEPSEEK)
    policy = family_policy(folder)
    assert "keys of size 24 and values of size 16" in check_forward(policy)
    assert engine_difference(policy, folder, [40, 23, 61]) < 1e-4
    assert learner_difference(policy, folder) < 1e-4


CHANGED_LOGITS = {
    "divided": ("GraniteConfig", {"logits_scaling": 4.0}),
    "multiplied": ("CohereConfig", {"logit_scale": 3.0}),
    "capped": ("Gemma3TextConfig", {"layer_types": FULL, "final_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize(("config", "options"), CHANGED_LOGITS.values(), ids=CHANGED_LOGITS)
@pytest.mark.parametrize("rank", [0, 2])
def test_scaled_and_capped_logits_are_sampled_and_trained(config, options, rank, tmp_path):
    folder = make_family(tmp_path, config, **options)
    check_architecture(family_run(folder, f"model.lora.rank={rank}"))
    policy = family_policy(folder, f"model.lora.rank={rank}")
    check_forward(policy)
    if rank:
        return  # `own_logprobs` does not know the adapter; `check_forward` compares with it
    assert engine_difference(policy, folder, [40, 23, 61]) < 1e-4
    assert learner_difference(policy, folder) < 1e-4
    assert learner_difference(policy, folder, temperature=0.7) < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.index_fill(-1, torch.tensor([7]), -1e9),
        lambda logits: logits + 1.0,
        lambda logits: logits.clamp(-20.0, 20.0),
        lambda logits: logits * logits,
        lambda logits: logits * float("nan"),
    ],
    ids=["a forbidden token", "a shift", "a hard cap", "a square", "no number"],
)
def test_logits_that_are_no_scaled_or_capped_outputs_are_rejected(change, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(make_family(tmp_path, "Qwen3Config"))
    own_forward = model.forward

    def changed(*arguments, **options):
        output = own_forward(*arguments, **options)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    with pytest.raises(ConfigError, match="of a logit remains"):
        reject_unsupported(model)


def test_hidden_states_that_change_before_the_head_are_rejected(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(make_family(tmp_path, "Qwen3Config"))
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0] + 1.0,))
    with pytest.raises(ConfigError, match="between its decoder and its head"):
        reject_unsupported(model)


def test_a_head_that_reads_something_else_than_the_decoders_output_is_rejected():
    with torch.device("meta"):
        model = transformers.RoFormerForCausalLM(transformers.RoFormerConfig(is_decoder=True))
    with pytest.raises(ConfigError, match="RoFormerForCausalLM does not pass its decoder's hidden"):
        reject_unsupported(model)


def test_the_language_model_of_one_that_also_sees_is_trained_by_itself(tmp_path):
    text = make_family(tmp_path / "text", "MistralConfig", sliding_window=None)
    config = transformers.Mistral3Config(
        text_config=transformers.AutoConfig.from_pretrained(text),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ),
        tie_word_embeddings=False,
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    folder = tmp_path / "whole"
    whole.save_pretrained(folder)
    load_tokenizer(family_run(text).model).save_pretrained(folder)

    check_architecture(family_run(folder, "model.lora.rank=2"))
    policy = family_policy(folder)
    row = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = whole.eval()(row).logits
    assert torch.allclose(policy.model_logits(row), expected, atol=1e-5)
    PolicyWeights(policy).write_weights(tmp_path / "written")
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    with torch.inference_mode():
        assert torch.allclose(written(row).logits, expected, atol=1e-5)


ADAPTED = {
    # The first layer has no experts: peft alone takes its layers for theirs, and leaves them out.
    "experts": (
        "Qwen3MoeConfig",
        families.EXPERTS | {"mlp_only_layers": [0]},
        "down_proj 1, experts.down_proj 1, experts.gate_up_proj 1, gate_proj 1, k_proj 2, o_proj 2"
        ", q_proj 2, up_proj 1, v_proj 2; none: gate 1",
    ),
    "experts that peft does not know": (
        "GptOssConfig",
        EXPERTS | {"layer_types": FULL},
        "k_proj 2, o_proj 2, q_proj 2, v_proj 2; "
        "none: experts.down_proj 2, experts.gate_up_proj 2, router 2",
    ),
    "Mamba": (
        "FalconH1Config",
        MAMBA | {"mamba_d_ssm": 128},
        "down_proj 2, gate_proj 2, in_proj 2, k_proj 2, o_proj 2, q_proj 2, up_proj 2, v_proj 2; "
        "none: out_proj 2",
    ),
    "blocks that share their matrices": (
        "Zamba2Config",
        MAMBA
        | {"layers_block_type": 2 * ["mamba", "hybrid"], "num_mem_blocks": 1}
        | {"num_hidden_layers": 4, "num_key_value_heads": 4, "chunk_size": 16},
        "in_proj 4, linear 2; none: down_proj 2, gate_up_proj 2, gate_up_proj_adapter_list 8, "
        "k_proj 2, o_proj 2, out_proj 4, q_proj 2, v_proj 2",
    ),
}


@pytest.mark.parametrize(("config", "options", "kinds"), ADAPTED.values(), ids=ADAPTED)
def test_all_linear_is_all_but_routers_and_what_is_read_past_adapters(
    config, options, kinds, tmp_path
):
    folder = make_family(tmp_path, config, **options)
    model = check_architecture(family_run(folder, "model.lora.rank=2"))
    assert describe_adapter(model) == f"adapters of rank 2: {kinds}"

    policy = family_policy(folder, "model.lora.rank=2")
    check_forward(policy)
    adapter = [values for name, values in policy.trained_parameters() if ".lora_" in name]
    batch = pack(random_samples(2), share=policy.packs_rows)
    policy.logprobs(batch, 1.0)[0].sum().backward()
    assert all(values.grad is not None and values.grad.abs().max() > 0 for values in adapter)


def test_attention_that_scaled_dot_products_lose_is_that_of_the_models_authors(
    tmp_path, monkeypatch
):
    """transformers' attention of scaled dot products leaves out sinks without a word."""
    attend = packed.sdpa_attention_forward
    monkeypatch.setattr(
        packed, "_alone", lambda *given, s_aux=None, **options: attend(*given, **options)[0]
    )
    folder = make_family(tmp_path, "GptOssConfig", layer_types=FULL, **EXPERTS)
    policy = family_policy(folder)
    assert "attention by scaled dot products differs" in check_forward(policy)
    assert policy.attention == "eager"
    assert policy.sampler is Sampler.PLAIN
    assert policy.twin().attention == "eager"
    assert engine_difference(policy, folder, [61, 23, 40]) < 1e-4
    assert learner_difference(policy, folder) < 1e-4


def test_a_pass_that_leaves_out_the_adapter_is_found_before_the_adapter_is_trained(tmp_path):
    folder = make_family(tmp_path, "Qwen3Config", tie_word_embeddings=False)
    adapter = ("model.lora.rank=2", "model.lora.target_modules=[q_proj,lm_head]")
    model = family_run(folder, *adapter).model
    policy = load_policy(model, seed=0, device=torch.device("cpu"))
    before = [values.clone() for _, values in policy.trained_parameters()]
    assert check_forward(policy) is None
    after = [values for _, values in policy.trained_parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    policy._head = policy._head.base_layer
    with pytest.raises(ConfigError, match="forward pass differs"):
        check_forward(policy)
