"""The forward passes agree, or the run does not start."""

import pytest
import torch
from fakes import assert_same_update, loss_and_gradients, random_samples, tiny_policy

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward_check import check_forward


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_tiny_model_passes(lora_rank, autocast):
    policy = tiny_policy(lora_rank=lora_rank, autocast=autocast)
    check_forward(policy)
    assert policy.packs_rows


@pytest.mark.parametrize("scale", [0.5, float("nan")])
def test_an_architecture_that_scales_its_logits_is_refused(scale):
    """Granite, Cohere and Gemma do something to their logits behind the head."""
    policy = tiny_policy()
    policy.model.register_forward_hook(
        lambda module, args, output: output.__setitem__("logits", output.logits * scale)
    )
    with pytest.raises(ConfigError, match="the learner's"):
        check_forward(policy)


def test_attention_that_the_cache_does_not_know_is_refused():
    policy = tiny_policy()
    decoder = policy.model.get_decoder()

    def forget_the_past(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is not None:
            kwargs["attention_mask"] = mask & torch.eye(*mask.shape[-2:], dtype=torch.bool)
        return args, kwargs

    decoder.register_forward_pre_hook(forget_the_past, with_kwargs=True)
    with pytest.raises(ConfigError, match="engine=local"):
        check_forward(policy)


@pytest.mark.parametrize("refuses", [False, True])
def test_attention_that_packed_rows_do_not_fit_is_trained_in_padded_ones(refuses):
    """Sinks, caps, windows, or a decoder that passes nothing on: the update is the same."""
    samples = random_samples(0)
    expected = loss_and_gradients(tiny_policy(), samples)
    policy = tiny_policy()

    def lose(module, args, kwargs):
        if kwargs.pop("packed_row", None) and refuses:
            raise TypeError("an unexpected keyword")
        return args, kwargs

    policy.model.get_decoder().register_forward_pre_hook(lose, with_kwargs=True)
    check_forward(policy)
    assert not policy.packs_rows
    assert_same_update(loss_and_gradients(policy, samples), expected)
