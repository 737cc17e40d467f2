"""Renew what vLLM 0.32's reload of all weights leaves as it was.

The reload finds a layer's weights by the calls of its weight loaders, and packs a layer's weights
again only if it has read them. It leaves out three things: output heads that are tied to the
embeddings, and the experts of mixtures, both of which a CPU computes from packed copies; and what
GPT-OSS copies without a weight loader, which are its experts and sinks.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

Weights = Iterable[tuple[str, torch.Tensor]]
EXPERTS = re.compile(r"(.+\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")  # of GPT-OSS
SINKS = re.compile(r".+\.layers\.(\d+)\..+\.sinks")


@contextlib.contextmanager
def renewed(model: Any) -> Iterator[None]:
    """Within the block, have the reload of a model's weights renew all of them."""
    if current_platform.is_cpu():
        _forget_kernels(model)
    if type(model).__name__ == "GptOssForCausalLM":
        with _by_weight_loaders(model):
            yield
    else:
        yield
    if current_platform.is_cpu():
        _repack_heads(model)


def _forget_kernels(model: Any) -> None:
    """Make vLLM pack the experts of mixtures again, which it does where there is no kernel yet."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


@torch.inference_mode()
def _repack_heads(model: Any) -> None:
    """Pack the weights of output heads again.

    vLLM's reload packs only the layers whose weights it has read. An output head that is tied to
    the embeddings is not among them.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _by_weight_loaders(model: Any) -> Iterator[None]:
    """Within the block, load each expert of GPT-OSS by itself, and its sinks at the end.

    Single experts go through weight loaders, but all experts at once do not.
    """
    sinks: dict[int, torch.Tensor] = {}

    def one_by_one(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, values in weights:
            if found := SINKS.fullmatch(name):
                sinks[int(found[1])] = values.clone()
            elif found := EXPERTS.fullmatch(name):
                yield from ((f"{found[1]}.{i}.{found[2]}", each) for i, each in enumerate(values))
            else:
                yield name, values

    load = model.load_weights
    model.load_weights = lambda weights: load(one_by_one(weights))
    try:
        yield
    finally:
        del model.load_weights
    rank = get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if found := SINKS.fullmatch(name):
            size = len(parameter)
            parameter.data.copy_(sinks[int(found[1])][rank * size : (rank + 1) * size])
