"""What a model makes of its head's outputs before they are its logits: a scale, a cap, or both.

Granite, Cohere and Falcon-H1 scale them, Gemma caps them. Configurations name this in many ways, so
it is measured: the model's own forward pass gets made-up outputs of its head.
"""

from dataclasses import dataclass
from typing import Any

import torch

from openenv_pipe.errors import ConfigError

_SMALL, _LARGE = 2.0**-10, 2.0**30  # logits that no cap changes, and that every cap cuts off
_SPREAD = 60.0  # logits between -60 and 60 have to fit
_TOLERANCE = 1e-4  # of a logit, relative to the largest of them
ADVICE = "choose another model, such as Qwen3 or Llama"


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A head's output z becomes the logit scale * z, or cap * tanh(scale * z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits of the same shape; float32 where they differ from the head's outputs."""
        if self == UNCHANGED:
            return outputs
        scaled = outputs.float() * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


UNCHANGED = LogitTransform()


def measure_logit_transform(model: Any, decoder: Any) -> LogitTransform:
    """Measure what a causal language model does after its head, even on the device `meta`.

    Decoder and head are replaced meanwhile, so that this takes neither weights nor time.

    Raises:
        ConfigError: It is neither a scale nor a cap, or decoder and head are not directly joined.
    """
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"model.path: {name} has no head that predicts tokens; expected a causal language model"
        )
    vocabulary = len(head.weight)
    # From 1 to 2, in steps of bfloat16, which Mamba rounds to if its weights are in bfloat16.
    size = model.config.get_text_config().hidden_size
    hidden = 1.0 + torch.arange(4 * size).remainder(128).view(1, 4, size) / 128
    spread = _SPREAD * torch.linspace(-1.0, 1.0, vocabulary)
    levels = [torch.full((vocabulary,), _SMALL), torch.full((vocabulary,), _LARGE)]
    outputs = torch.stack([*levels, spread, spread.flip(0)])[None]
    received: list[torch.Tensor] = []

    def head_forward(states: torch.Tensor) -> torch.Tensor:
        received.append(states)
        return outputs.clone()  # some models change them in place

    # Most models call their base model, and OPT calls the decoder inside of it.
    parts = {decoder, model.base_model} - {model}
    for part in parts:
        part.forward = lambda *arguments, **options: _HiddenStates(hidden)
    head.forward = head_forward
    try:
        token_ids = torch.zeros(1, 4, dtype=torch.int64)
        with torch.no_grad():
            logits = model(input_ids=token_ids, use_cache=False).logits.float()
    except Exception as error:
        raise ConfigError(
            f"model.path: {name} does not pass its decoder's hidden states to its head, as causal "
            f"language models do ({type(error).__name__}: {str(error)[:200]}); {ADVICE}"
        ) from error
    finally:
        for part in (*parts, head):
            del part.forward
    before = _scale_before_head(name, head, hidden, received)
    scale = float(logits[0, 0, 0]) / _SMALL
    largest = float(logits[0, 1, 0])
    cap = largest if largest < 0.5 * scale * _LARGE else None
    transform = UNCHANGED if torch.equal(logits, outputs) else LogitTransform(scale, cap)
    expected = transform(outputs)
    errors = (logits - expected)[0].abs().amax(dim=1) / expected[0].abs().amax(dim=1)
    if not errors.max() <= _TOLERANCE:  # also rejects NaN
        raise ConfigError(
            f"model.path: {name} changes the outputs of its head by more than a scale and a cap "
            f"(with scale {scale:g} and cap {cap}, {errors.max():.2g} of a logit remains, and "
            f"{_TOLERANCE:g} is allowed), which the learner's logprobs would leave out; {ADVICE}"
        )
    return transform if before == 1.0 else LogitTransform(transform.scale * before, cap)


def _scale_before_head(
    name: str, head: Any, hidden: torch.Tensor, received: list[torch.Tensor]
) -> float:
    """Return the factor of the hidden states before the head, which a head without bias passes on.

    Raises ConfigError if anything else happens to them.
    """
    if len(received) == 1 and received[0].shape == hidden.shape:
        if torch.equal(received[0], hidden):
            return 1.0
        ratios = received[0] / hidden
        before = float(ratios.mean())
        is_one_factor = (ratios - before).abs().max() <= _TOLERANCE * abs(before)
        if is_one_factor and getattr(head, "bias", None) is None:
            return before
    raise ConfigError(
        f"model.path: {name} changes hidden states between its decoder and its head by more than "
        f"one factor, which is not supported; {ADVICE}"
    )


class _HiddenStates:
    """What a decoder returns, for a model whose decoder is left out."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        """All other outputs are None."""
