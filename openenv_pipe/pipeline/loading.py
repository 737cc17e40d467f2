"""Load the policy of a run onto its devices, and say what it lacks."""

import logging
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models.forward.forward_check import UNPROBED
from openenv_pipe.models.load import (
    reject_long_episodes,
    reject_rerendered,
    reject_unsupported_vision,
)
from openenv_pipe.models.policy import Policy

_log = logging.getLogger(__name__)


def load_checked(
    config: RunConfig, devices: Devices, checkpoint: Path | None, notify: Callable[[str], None]
) -> Policy | None:
    """Load the model, and check its forward pass and its number of positions.

    Returns None if the engine needs no model in this process. Raises ConfigError.
    """
    if not config.engine.capabilities.needs_tokenizer:
        return None
    reject_unsupported_vision(config)
    policy, reason = devices.load_policy(checkpoint)
    if reason is not None:
        model = config.model.label
        notify(f"model {model} does not support packed rows ({reason}); training pads samples")
    if why := policy.left_out.get(UNPROBED):
        notify(f"the model's forward passes are not {UNPROBED}: {why}")
    if config.engine.samples_in_process and policy.samplers_left_out:
        skipped = [f"{name}: {why}" for name, why in policy.samplers_left_out.items()]
        _log.info("sampling is %s (not %s)", policy.sampler, "; not ".join(skipped))
    reject_long_episodes(config, policy.model)
    reject_rerendered(config, policy.chat)
    if config.model.history == "auto" and policy.chat.history == "rerender":
        notify(
            "the chat template rewrites earlier turns, so it renders every prompt anew "
            "(model.history=rerender), and a sample begins wherever it changes something; a "
            "model.chat_template that keeps earlier turns is cheaper"
        )
    return policy
