"""The policy's weights in the form that servers need, and the logprobs to check a server.

Shape letters: P prompts, V vocabulary.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from openenv_pipe.errors import TrainingError
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.quantization import dense_state
from openenv_pipe.models.safetensors_only import plain_name
from openenv_pipe.system.files import naming
from openenv_pipe.types import Image

_PROBE_SEED = 20_230_614
_FIRST_PROBE_SIZE, _MOST_DOUBLINGS = 1e-2, 16


class PolicyWeights:
    """Gives a policy's weights to vLLM servers, as files or tensors, and its logprobs.

    All methods block and must run in torch's thread.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._adapter = getattr(policy.model, "peft_config", {}).get("default")
        self._shapes, self._tied = _base_shapes(self._base)
        # The adapters' layers, by the name of the weight that each adds to.
        self._adapted: dict[str, Any] = {
            plain_name(f"{path}.{getattr(module, 'parameter_name', 'weight')}"): module
            for path, module in self._base.named_modules()
            if isinstance(module, LoraLayer)
        }
        self.lora_rank: int = self._adapter.r if self._adapter else 0
        self.precision = str(policy.precision).removeprefix("torch.")
        self.dtype = str(policy.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
        self.vocabulary_size: int = len(policy.model.get_input_embeddings().weight)
        self.end_ids = policy.end_ids
        self.placeholder_id = policy.images.placeholder_id if policy.images else None
        self.probe_images = policy.probe_images

    def write_base(self, folder: Path) -> None:
        """Write the model without its adapter, and the tokenizer, in transformers' format."""
        with naming(folder):
            self._base.save_pretrained(folder, state_dict=self._plain_weights(with_adapter=False))
            self._policy.save_tokenizer(folder)

    def write_weights(self, folder: Path) -> None:
        """Write all weights with the adapter merged in. The policy's own weights do not change."""
        with naming(folder):
            self._base.save_pretrained(folder, state_dict=self._plain_weights(with_adapter=True))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what `write_weights` writes, on the learner's device.

        Weights without a merged adapter are the policy's own tensors, not copies.
        """
        return revert_weight_conversion(self._base, self._plain_weights(with_adapter=True))

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone, in peft's format."""
        self.write_adapter_of(folder, None)

    def write_adapter_of(self, folder: Path, adapter: dict[str, torch.Tensor] | None) -> None:
        """Write an adapter of the policy's shape; None: the policy's own."""
        assert self._adapter is not None
        folder.mkdir(parents=True, exist_ok=True)
        with naming(folder):
            self._adapter.save_pretrained(str(folder))
        tensors = get_peft_model_state_dict(
            self._policy.model, state_dict=adapter, save_embedding_layers=False
        )
        self._check_adapter(tensors)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with naming(folder):
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
            with self._probe_adapter(size):
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

    def num_image_tokens(self, image: Image) -> int:
        """Return how many placeholders an image has in prompts."""
        assert self._policy.images is not None
        return self._policy.images.num_tokens(image)

    def read_image(self, image: Image) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of an image: patches [N, D] in float32, and its grid [3].

        Raises RunFolderError: the image's file cannot be read.
        """
        assert self._policy.images is not None
        patches = self._policy.images.patches([image])
        return patches.numpy(), self._policy.images.grids([image])[0].numpy()

    @torch.inference_mode()
    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Return logprobs [P, V], float32, of the token after each prompt.

        Prompts may show `probe_images`.
        """
        policy = self._policy
        shown: dict[str, Any] = {"images": self.probe_images} if self.probe_images else {}
        rows = []
        for ids in prompts:
            hidden = policy.hidden(torch.tensor([list(ids)], device=policy.device), **shown)
            logits_V = policy.logits(hidden[:, -1])[0].float()
            rows.append(torch.log_softmax(logits_V / temperature, dim=-1).cpu().numpy())
        return np.stack(rows)

    def _probe_adapter(self, size: float) -> contextlib.AbstractContextManager[None]:
        """Return a block within which the adapter has fixed random weights.

        size: their standard deviation.
        """
        own = [values.data for _, values in self._policy.trained_parameters()]
        made_up = zip(made_up_values([values.shape for values in own], size), own, strict=True)
        return self._policy.lent_weights([each.to(values) for each, values in made_up])

    @torch.no_grad()
    def _plain_weights(self, with_adapter: bool) -> dict[str, torch.Tensor]:
        """Return the weights by transformers' names; `with_adapter`: with the adapter merged in."""
        state = dense_state(self._base).items()
        plain = {plain_name(name): tensor for name, tensor in state if ".lora_" not in name}
        self.check_names(plain)
        for name, layer in self._adapted.items() if with_adapter else ():
            product = layer.get_delta_weight("default")
            plain[name] = (plain[name].float() + product.float()).to(plain[name])
        return {name: plain[name] for name in self._shapes}

    def check_names(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Check that weights have the names and shapes of the base model; tied ones may be there.

        Raises:
            TrainingError: They differ. A server or a reader would draw missing weights at random.
        """
        shapes = {name: tuple(each.shape) for name, each in weights.items()}
        known = {*self._shapes, *self._tied}
        odd = [f"missing {name}" for name in self._shapes if name not in shapes]
        odd += [f"unknown {name}" for name in shapes if name not in known]
        odd += [
            f"{name} has shape {list(shapes[name])} instead of {list(shape)}"
            for name, shape in self._shapes.items()
            if shapes.get(name, shape) != shape
        ]
        if odd:
            raise TrainingError(
                f"{len(odd)} weights do not fit {type(self._base).__name__}: {', '.join(odd[:5])}; "
                "a reader would initialize missing ones at random, so nothing was written"
            )

    def _check_adapter(self, adapter: Mapping[str, torch.Tensor]) -> None:
        """Check that each matrix of an adapter in peft's format fits a matrix of the base model.

        Raises TrainingError: A server would not know the module, or read the matrix as another one.
        """
        for name, values in adapter.items():
            path, _, matrix = name.removeprefix("base_model.model.").partition(".lora_")
            shape = self._shapes.get(f"{path}.weight")
            side = {"A.weight": 1, "B.weight": 0}.get(matrix)  # the dimension that the two share
            if shape is None or (side is not None and values.shape[side] != shape[side]):
                raise TrainingError(
                    f"the adapter's {name} {list(values.shape)} fits no matrix of "
                    f"{type(self._base).__name__} (found: {shape}); set engine.publish=merged"
                )

    @property
    def _base(self) -> Any:
        """The transformers model without peft's wrapper."""
        model = self._policy.model
        return model if self._adapter is None else model.get_base_model()


def made_up_values(shapes: Sequence[torch.Size], size: float) -> Iterator[torch.Tensor]:
    """Draw fixed random tensors. size: their standard deviation."""
    draw = torch.Generator().manual_seed(_PROBE_SEED)
    for shape in shapes:
        yield torch.randn(shape, generator=draw) * size


def _base_shapes(base: Any) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return names and shapes of the weights of a new model like this, and names of tied ones."""
    with torch.device("meta"):
        empty = type(base)(copy.deepcopy(base.config))
    tied = set(empty.all_tied_weights_keys or ())
    state = empty.state_dict()
    return {name: tuple(state[name].shape) for name in state if name not in tied}, tied
