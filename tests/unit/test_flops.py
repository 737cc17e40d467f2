"""The estimate of an update's FLOPs against torch's own counter."""

import pytest
import torch
from fakes import random_samples, run_config, tiny_policy
from torch.utils.flop_counter import FlopCounterMode

from openenv_pipe.learner.flops import count_flops, matrix_flops_per_s
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.flop_count import FlopCount, Size
from openenv_pipe.models.forward import products
from openenv_pipe.models.memory_estimate import model_shape
from tests.families import family_policy, make_family

LENGTH = 32  # as many rows as products of oneDNN have
SIZE = Size(
    num_tokens=LENGTH, num_contexts=LENGTH * LENGTH, num_finished=LENGTH, num_predicted=LENGTH
)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_flops_are_those_that_torch_counts(lora_rank, monkeypatch):
    """Torch counts the masked half of attention too, and the gradients of the adapter's
    matrices. It does not count the products of oneDNN."""
    monkeypatch.setattr(products, "is_by_onednn", lambda *values: False)
    policy = tiny_policy(lora_rank=lora_rank)
    work = count_flops(policy.model)
    policy.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        logits = policy.model(torch.ones(1, LENGTH, dtype=torch.int64)).logits
    assert counter.get_total_flops() == pytest.approx(work.forward(SIZE), rel=0.01)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    expected = work.forward_and_backward(SIZE) - work.forward(SIZE)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.1 if lora_rank else 0.01)


def test_a_model_that_is_not_loaded_is_counted_from_its_shape():
    policy = tiny_policy()
    shape = model_shape(policy.model.config.to_dict(), policy.num_parameters)
    assert shape is not None
    assert FlopCount.of_shape(shape, trains_all=True) == count_flops(policy.model)


def test_layers_whose_heads_have_another_size_are_counted_each(tmp_path):
    """Two layers of Gemma 4, of four heads: of 16 with a window, of 32 without one."""
    options = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    }
    policy = family_policy(make_family(tmp_path, "Gemma4TextConfig", **options))
    assert count_flops(policy.model).attention_width == 4 * 16 + 4 * 32


def test_the_matrix_product_is_measured_once():
    rate = matrix_flops_per_s(torch.device("cpu"), torch.float32, torch.get_num_threads())
    assert rate > 0
    again = matrix_flops_per_s(torch.device("cpu"), torch.float32, torch.get_num_threads())
    assert again == rate


def test_speed_is_a_matter_of_time_and_named_so():
    policy = tiny_policy()
    learner = Learner(policy, run_config().trainer, max_episode_tokens=120, seed=0)
    metrics = learner.update(random_samples(0), step=1)
    assert metrics["tokens/computed"] >= metrics["tokens/trained"]
    speeds = {"time/mfu", "time/matrix_tflops", "time/learner_tokens_per_s"}
    assert speeds <= set(metrics)
    assert all(metrics[name] > 0 for name in speeds)
