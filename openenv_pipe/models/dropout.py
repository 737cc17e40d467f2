"""Dropout of a policy: off while it samples and in GRPO, whose ratios it would make noise of."""

import contextlib
from collections.abc import Iterator

import torch

from openenv_pipe.models.policy import Policy


def has_dropout(policy: Policy) -> bool:
    """Return whether the model draws random numbers for dropout now."""
    layers = (m for m in policy.model.modules() if isinstance(m, torch.nn.Dropout))
    in_attention = getattr(policy.decoder.config, "attention_dropout", 0.0)
    rates = [in_attention, *(layer.p for layer in layers)]
    return policy.model.training and any(rates)


@contextlib.contextmanager
def with_dropout(policy: Policy) -> Iterator[None]:
    """Within the block, enable dropout for supervised learning, if the model has any."""
    policy.model.train()
    try:
        yield
    finally:
        policy.model.eval()
