"""Every causal language model of transformers is computed exactly, or rejected with its reason."""

import copy
import re

import pytest
import torch
import transformers
from fakes import random_samples, tiny_policy

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.architecture_check import reject_unsupported
from openenv_pipe.models.forward.forward_check import check_forward
from tests.every_family import DIFFERENT, NAMES, is_tiny, policy_of, tiny_config, tiny_model

BOUND = 3e-4  # in nats: rounding, also of rows in which recurrent layers add much of it up
# 3.4e-4 on some CPUs, and still 2.2e-4 in float64, because its linear attention is in float32.
BOUNDS = {"lara_mini": 1e-3}
REASON = r"not causal|decoder and its head|differs from the model's own by \d|fails on a probe"


def names(*lines):
    return frozenset(" ".join(lines).split())


# Those of which the sizes make no tiny model: parts with sizes of their own, or required settings.
LARGE = names(
    "blt cohere_compass_text dbrx dots3_note dots3_note_text fuyu gemma3 gemma3n gemma4_assistant",
    "gemma4_unified_assistant git got_ocr2 moss_transcribe_diarize musicgen musicgen_melody",
    "phi4_multimodal qwen4_exp qwen4_exp_text reformer",
)
# Encoders that read later tokens, layers that choose tokens by scores which padding changes, and
# others that no forward pass of the package computes. ModernBERT has a layer before its head.
REJECTED = names(
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert",
    "cpmant data2vec-text electra ernie marian mbart megatron-bert pegasus plbart prophetnet",
    "rembert roberta roberta-prelayernorm roc_bert roformer whisper xlm xlm-roberta",
    "xlm-roberta-xl xlnet xmod modernbert-decoder axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
)


def own_logprobs(model, ids):
    """The logprobs [T, V] of the model's authors."""
    return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)


@torch.inference_mode()
def sampled_difference(policy, own):
    """Return how much the sampler's logprobs differ in rows that get a turn, a token, a turn."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 250, (length,), generator=draw).tolist() for length in (61, 23, 40)]
    expected = [own_logprobs(own, row) for row in rows]
    firsts, lengths = [30, 11, 20], [len(row) for row in rows]
    (forward,) = policy.row_forwards(1)
    forward.reserve_rows(3)
    step = torch.tensor([row[first] for row, first in zip(rows, firsts, strict=True)])
    tails = [row[first + 1 :] for row, first in zip(rows, firsts, strict=True)]
    found = [
        (forward.feed([row[:k] for row, k in zip(rows, firsts, strict=True)], [0] * 3), firsts),
        (forward.step(step, torch.tensor(firsts)), [k + 1 for k in firsts]),
        (forward.feed(tails, [k + 1 for k in firsts]), lengths),
    ]
    return max(
        (torch.log_softmax(logits[row], -1) - expected[row][ends[row] - 1]).abs().max().item()
        for logits, ends in found
        for row in range(3)
    )


@torch.inference_mode()
def trained_difference(policy, own):
    """Return how much the learner's logprobs differ."""
    samples = random_samples(0)
    learned = policy.logprobs(pack(samples, share=policy.packs_rows, device=policy.device), 1.0)[0]
    expected = [
        logprobs[place - 1, sample.token_ids[place]]
        for sample, logprobs in ((each, own_logprobs(own, each.token_ids)) for each in samples)
        for place, is_trained in enumerate(sample.loss_mask)
        if is_trained
    ]
    return (learned - torch.stack(expected)).abs().max().item()


@pytest.fixture(scope="module")
def chat():
    return tiny_policy().chat


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LARGE])
def test_a_causal_language_model_is_computed_exactly_or_rejected_with_its_reason(name, chat):
    if not is_tiny(name):
        pytest.skip("this version of transformers has it, and its sizes have other names")
    model = tiny_model(name)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    try:
        policy = policy_of(model, chat)
        check_forward(policy, max_tokens=200)
    except ConfigError as error:
        assert name in REJECTED, error
        assert re.search(REASON, str(error)), error
        return
    assert name not in REJECTED
    assert sampled_difference(policy, own) < BOUNDS.get(name, BOUND)
    assert trained_difference(policy, own) < BOUND


@pytest.mark.parametrize("name", ["falcon_mamba", "mamba", "mamba2", "opt"])
def test_check_and_train_support_the_same_families_in_each_precision(name):
    """`check` builds a model without values, and `model=hub` has bfloat16 by default."""
    for device in ("meta", "cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(
                    tiny_config(name), dtype=dtype
                )
            reject_unsupported(model)


@pytest.mark.parametrize("name", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_rows_are_compared_that_have_more_tokens_than_attention_chooses(name, chat, monkeypatch):
    monkeypatch.setitem(DIFFERENT, name, {**DIFFERENT.get(name, {}), "index_topk": 64})
    with pytest.raises(ConfigError, match=REASON):
        check_forward(policy_of(tiny_model(name), chat), max_tokens=200)


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_next"])
def test_in_bfloat16_no_state_passes_from_one_packed_row_to_the_next(name, chat, monkeypatch):
    """With transformers' initial weights, the error is less than the bound of bfloat16."""
    if name == "lfm2":
        layers = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
        monkeypatch.setitem(DIFFERENT, name, layers)
    model = tiny_model(name)
    for values in model.parameters():
        if values.ndim > 1:
            values.data.normal_(0.0, 0.02)
    policy = policy_of(model, chat, torch.bfloat16)
    assert "keep a state" in check_forward(policy, max_tokens=200)
    assert not policy.packs_rows
