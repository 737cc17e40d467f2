"""The load-balancing loss of a mixture's routers, as in Switch Transformer and transformers.

Shape letters: T tokens, E experts.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.errors import ConfigError

KEY = "trainer.loss.router_aux_coef"


def reject_without_routers(decoder: Any, coef: float) -> None:
    """Raise ConfigError if a loss is asked for that the model's authors do not have."""
    if coef and not (has_routers(decoder) and _has_this_loss(decoder)):
        raise ConfigError(
            f"{KEY}={coef:g}: {type(decoder).__name__} has no load-balancing loss in transformers; "
            f"set {KEY}=0"
        )


def has_routers(decoder: Any) -> bool:
    """Return whether transformers can record what the decoder's routers choose."""
    return bool(_routers(decoder))


@contextlib.contextmanager
def recorded_routing(decoder: Any) -> Iterator[list[torch.Tensor]]:
    """Within the block, append the logits [T, E] of each router that computes to the list."""
    logits: list[torch.Tensor] = []

    def record(router: Any, inputs: Any, outputs: Any) -> None:
        found = outputs[decoder._can_record_outputs["router_logits"].index]
        logits.append(found.flatten(end_dim=-2))

    hooks = [router.register_forward_hook(record) for router in _routers(decoder)]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(decoder: Any, logits: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the loss of a batch's tokens; the number of experts per token is perfect balance.

    logits: what `recorded_routing` has recorded of the batch, in one row or in padded rows
    """
    config, mask_BT = decoder.config, None
    if len(logits[0]) != len(batch.token_ids):
        lengths_B = torch.tensor([each.end - each.start for each in batch.nodes])
        mask_BT = (torch.arange(int(lengths_B.max())) < lengths_B[:, None]).to(logits[0].device)
    top_k, num_experts = config.num_experts_per_tok, logits[0].shape[-1]
    of_layers: Any = tuple(logits)  # transformers' annotation is for one layer
    loss = load_balancing_loss_func(of_layers, num_experts, top_k, mask_BT)
    assert isinstance(loss, torch.Tensor)
    return loss


def _has_this_loss(decoder: Any) -> bool:
    """Return whether the model's authors have a coefficient and a loss with Mixtral's arguments.

    Llama 4 has a coefficient alone, and Doge's loss is another one.
    """
    own = getattr(
        sys.modules[_router_class(decoder).__module__], load_balancing_loss_func.__name__, None
    )
    if own is None or not hasattr(decoder.config, "router_aux_loss_coef"):
        return False
    return [*inspect.signature(own).parameters] == [
        *inspect.signature(load_balancing_loss_func).parameters
    ]


def _router_class(decoder: Any) -> Any:
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    return getattr(recorder, "target_class", None)


def _routers(decoder: Any) -> list[Any]:
    kind = _router_class(decoder)
    return [each for each in decoder.modules() if kind is not None and isinstance(each, kind)]
