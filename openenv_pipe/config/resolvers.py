"""Defaults in `conf/` that depend on the engine, the model and the machine."""

from collections.abc import Mapping
from typing import Any

from openenv_pipe.config.learning_rates import default_lr, default_supervised_lr
from openenv_pipe.config.precision import fast_precision
from openenv_pipe.config.schema.engine import capabilities_of


def default_correction(engine: Mapping[str, Any]) -> str:
    """The value of `${default_correction:${engine}}` in `conf/trainer/`."""
    capabilities = capabilities_of(engine) if isinstance(engine, Mapping) else None
    return capabilities.default_correction if capabilities else "none"


def default_max_mismatch(engine: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """The value of `${default_max_mismatch:${engine},${model}}` in `conf/trainer/`."""
    capabilities = capabilities_of(engine) if isinstance(engine, Mapping) else None
    precision = model.get("autocast") if isinstance(model, Mapping) else None
    return capabilities.default_max_mismatch(str(precision)) if capabilities else 0.4


# In YAML, each has the name of its function.
RESOLVERS = (
    default_correction,
    default_max_mismatch,
    default_lr,
    default_supervised_lr,
    fast_precision,
)
