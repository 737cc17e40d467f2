"""The forward passes agree, or the run does not start."""

import pytest
import torch
from fakes import tiny_policy

from openenv_pipe.canary import check_forward
from openenv_pipe.errors import ConfigError


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_tiny_model_passes(lora_rank, autocast):
    check_forward(tiny_policy(lora_rank=lora_rank, autocast=autocast))


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
