"""Learning rates that fit a model: random weights, or pretrained ones in full or by LoRA, by size.

The rate that teaches random weights within a hundred steps destroys pretrained ones within ten, and
LoRA needs a larger one than full training does. A rate in YAML or on the command line wins.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `compose` reads this module, and the schema's rules read `compose`'s.
    from openenv_pipe.config.schema import ModelConfig, OptimizerConfig, RunConfig

# The number of parameters in a name: SmolLM2-135M, Qwen3-1.7B, gemma-3-1b-it, Mixtral-8x7B.
SIZE = re.compile(r"(?<![\d.a-zA-Z])(?:(\d+)x)?(\d+(?:\.\d+)?)([MmBb])(?![a-zA-Z])")
# A rate above this many times the default one gets a warning.
RISKY = 10.0
RISKY_MUON = 2e-4  # Muon's updates have the same size whatever the gradients


@dataclass(frozen=True, slots=True)
class Fit:
    """A kind of model, and AdamW's learning rates for it."""

    kind: str
    lr: float  # of reinforcement learning
    supervised_lr: float


RANDOM = Fit("random weights", 1e-3, 1e-3)
# For models of at most so many billion parameters. With SmolLM2-135M, 1e-5 in full was measured to
# learn sums within 30 steps, and 1e-4 by LoRA to learn nothing in 21; the other rates are those of
# other trainers' examples.
FULL = {
    0.5: Fit("pretrained weights in full", 1e-5, 5e-5),
    2.0: Fit("pretrained weights in full", 3e-6, 2e-5),
    inf: Fit("pretrained weights in full", 1e-6, 1e-5),
}
LORA = {
    0.5: Fit("LoRA on pretrained weights", 5e-4, 1e-3),
    2.0: Fit("LoRA on pretrained weights", 2e-5, 2e-4),
    inf: Fit("LoRA on pretrained weights", 1e-5, 1e-4),
}
UNKNOWN_SIZE = 2.0
STAGES = {"trainer.warm_start": "warm start", "trainer": "GRPO"}


def default_lr(model: Mapping[str, Any]) -> float:
    """The value of `${default_lr:${model}}` in `conf/trainer/`."""
    return _fit(model).lr


def default_supervised_lr(model: Mapping[str, Any]) -> float:
    """The value of `${default_supervised_lr:${model}}` in `conf/trainer/`."""
    return _fit(model).supervised_lr


def describe_lr(config: "RunConfig", overrides: Sequence[str] = ()) -> str:
    """Return the learning rate of each stage that the run has, and whether it is the default for
    this kind of model.

    overrides: those of the command line, which may set a rate to the default.
    """
    fit, texts = _fit(config.model.model_dump()), []
    for key, optimizer, lr in _stages(config, fit):
        text = f"{STAGES[key]}: {optimizer.type} {optimizer.lr:g}"
        is_set = any(each.lstrip("+").startswith(f"{key}.optimizer.lr=") for each in overrides)
        text += ", set on the command line" if is_set else ""
        known = f"{' and' if is_set else ','} the default" if optimizer.lr == lr else None
        texts.append(text + (known or f" (default {lr:g})"))
    return f"{'; '.join(texts)}, for {_kind(config.model, fit)}" if texts else ""


def warn_of_lr(config: "RunConfig") -> str | None:
    """Return why a learning rate is likely to destroy a pretrained model; None if none is."""
    model = config.model
    if model.type == "tiny":
        return None
    fit = _fit(model.model_dump())
    for key, optimizer, lr in _stages(config, fit):
        limit = RISKY_MUON if optimizer.type == "muon" else RISKY * lr
        if optimizer.lr > limit:
            return (
                f"{key}.optimizer.lr={optimizer.lr:g} with {key}.optimizer.type={optimizer.type} "
                "is likely to destroy the pretrained model within a few steps: replies become "
                f"unusable, or all the same; set at most {limit:g}, or leave both keys out for "
                f"adamw {lr:g}, the default for {_kind(model, fit)}"
            )
    return None


def _stages(config: "RunConfig", fit: Fit) -> Iterator[tuple[str, "OptimizerConfig", float]]:
    """Yield the key, the optimizer and the default rate of each stage that has steps."""
    if config.trainer.warm_start.steps:
        yield "trainer.warm_start", config.trainer.warm_start.optimizer, fit.supervised_lr
    if config.trainer.steps:
        yield "trainer", config.trainer.optimizer, fit.lr


def _fit(model: Mapping[str, Any]) -> Fit:
    # The schema rejects a model that is not a block, later.
    if not isinstance(model, Mapping) or model.get("type") != "hub":
        return RANDOM
    rates = LORA if (model.get("lora") or {}).get("rank") else FULL
    size = _size(str(model.get("path"))) or UNKNOWN_SIZE
    return next(fit for largest, fit in rates.items() if size <= largest)


def _size(path: str) -> float | None:
    """Return the billions of parameters that a model's name states; None if it states none.

    Of several sizes the largest counts: `1M` in Qwen2.5-7B-Instruct-1M is a context length.
    """
    found = SIZE.findall(path.rstrip("/").rpartition("/")[2])
    sizes = [
        int(experts or 1) * float(number) / (1000 if unit in "Mm" else 1)
        for experts, number, unit in found
    ]
    return max(sizes, default=None)


def _kind(model: "ModelConfig", fit: Fit) -> str:
    if model.type == "tiny":
        return fit.kind
    size = _size(model.path)
    by_name = "of unknown size" if size is None else f"{size:g} billion parameters by its name"
    return f"{fit.kind} ({by_name})"
