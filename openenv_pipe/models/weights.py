"""The policy's weights in the form that servers need, and the logprobs to check a server.

Shape letters: P prompts, V vocabulary.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from openenv_pipe.models.policy import Policy
from openenv_pipe.models.quantization import dense_state

_PROBE_SEED = 20_230_614
_FIRST_PROBE_SIZE, _MOST_DOUBLINGS = 1e-2, 16


class Publication:
    """Implements `engines.vllm.policy_source.PolicySource` for a policy.

    All methods block and must run in torch's thread.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._adapter = getattr(policy.model, "peft_config", {}).get("default")
        self.lora_rank: int = self._adapter.r if self._adapter else 0
        self.precision = "bfloat16" if policy.precision is torch.bfloat16 else "float32"
        self.vocabulary_size: int = policy.model.get_input_embeddings().num_embeddings
        self.end_id = policy.end_id

    def write_base(self, folder: Path) -> None:
        """Write the model without its adapter, and the tokenizer, in transformers' format."""
        self._write_model(folder, with_adapter=False)
        self._policy.tokenizer.save_pretrained(folder)

    def write_weights(self, folder: Path) -> None:
        """Write all weights with the adapter merged in. The policy's own weights do not change."""
        self._write_model(folder, with_adapter=True)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return what `write_weights` writes, on the learner's device.

        Weights without a merged adapter are the policy's own tensors, not copies.
        """
        base = self._base
        return revert_weight_conversion(base, _plain_weights(base, with_adapter=True))

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone, in peft's format."""
        assert self._adapter is not None
        folder.mkdir(parents=True, exist_ok=True)
        self._adapter.save_pretrained(str(folder))
        tensors = get_peft_model_state_dict(self._policy.model, save_embedding_layers=False)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def write_probe(
        self, folder: Path, prompts: Sequence[Sequence[int]], temperature: float, *, moves: float
    ) -> np.ndarray:
        """Write an adapter of random values and return the logprobs [P, V] with it.

        At least one of them differs from the policy's by `moves` or more.
        """
        before_PV = self.next_logprobs(prompts, temperature)
        size = _FIRST_PROBE_SIZE
        for _ in range(_MOST_DOUBLINGS):
            with self._made_up_adapter(size):
                after_PV = self.next_logprobs(prompts, temperature)
                if np.abs(after_PV - before_PV).max() >= moves:
                    self.write_adapter(folder)
                    return after_PV
            size *= 2
        raise AssertionError(f"an adapter of size {size / 2:g} does not change the policy")

    def free_memory(self) -> None:
        """Release the GPU memory that torch has cached, for other processes."""
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Return logprobs [P, V], float32, of the token after each prompt."""
        policy = self._policy
        rows = []
        for ids in prompts:
            hidden = policy.hidden(torch.tensor([list(ids)], device=policy.device))
            logits_V = policy.logits(hidden[:, -1])[0].float()
            rows.append(torch.log_softmax(logits_V / temperature, dim=-1).cpu().numpy())
        return np.stack(rows)

    @contextlib.contextmanager
    def _made_up_adapter(self, size: float) -> Iterator[None]:
        """Within the block, replace the adapter's weights by fixed random ones.

        size: their standard deviation.
        """
        own = [(parameter, parameter.data) for _, parameter in self._policy.trained_parameters()]
        draw = torch.Generator().manual_seed(_PROBE_SEED)
        try:
            for parameter, values in own:
                made_up = torch.randn(values.shape, generator=draw) * size
                parameter.data = made_up.to(values)
            yield
        finally:
            for parameter, values in own:
                parameter.data = values

    def _write_model(self, folder: Path, *, with_adapter: bool) -> None:
        base = self._base
        base.save_pretrained(folder, state_dict=_plain_weights(base, with_adapter))

    @property
    def _base(self) -> Any:
        """The transformers model without peft's wrapper."""
        model = self._policy.model
        return model if self._adapter is None else model.get_base_model()


@torch.no_grad()
def _plain_weights(base: Any, with_adapter: bool) -> dict[str, torch.Tensor]:
    """Return the weights by transformers' names; `with_adapter`: with the adapter merged in."""
    products = {
        f"{name}.weight": module.get_delta_weight("default")  # type: ignore[attr-defined]  # all of peft's have it
        for name, module in base.named_modules()
        if with_adapter and isinstance(module, LoraLayer)
    }
    tied = set(getattr(base, "all_tied_weights_keys", ()) or ())
    plain = {}
    for name, tensor in dense_state(base).items():
        if ".lora_" in name or name in tied:
            continue
        name = name.replace(".base_layer.", ".")
        product = products.get(name)
        plain[name] = tensor if product is None else (tensor.float() + product.float()).to(tensor)
    return plain
