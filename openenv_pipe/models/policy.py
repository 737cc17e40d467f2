"""The policy: a causal language model, with or without an adapter, that is sampled and trained.

Shape letters: B rows, T tokens, N trained tokens of a batch, U of them to compute.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.architecture_check import find_decoder, find_max_length
from openenv_pipe.models.forward.attention.packed import PackedRow, own_attention
from openenv_pipe.models.forward.gated_mlp import leave_out_unread_tokens, use_gated_mlps
from openenv_pipe.models.forward.logit_transform import measure_logit_transform
from openenv_pipe.models.forward.logprobs import token_logprobs
from openenv_pipe.models.forward.plain_forward import PlainForward, WholeForward
from openenv_pipe.models.forward.products import embed, pad_row, pads_rows, use_products
from openenv_pipe.models.forward.router_balance import has_routers
from openenv_pipe.models.forward.row_forward import (
    RowForward,
    Sampler,
    TransformersForward,
    fast_sampling,
    find_reaches,
)
from openenv_pipe.models.quantization import num_values
from openenv_pipe.models.safetensors_only import ADAPTER_CONFIG, load_adapter, read_model
from openenv_pipe.types import NO_IMAGES, Images

MAX_SMALL = 20_000_000  # parameters; operations of larger models are long enough for several cores


class Policy:
    """A transformers model and its chat format on one device.

    `model` may be wrapped by peft. Sampling and learning compute the same in the same precision.
    """

    # Why samples of this kind of model are never packed into one row; None: they may be.
    padding_reason: str | None = None
    # The forward passes for sampling that this kind of policy has, fastest first.
    samplers: tuple[Sampler, ...] = tuple(Sampler)
    # Made-up images for comparisons of forward passes, where the model sees images.
    probe_images: Images = NO_IMAGES

    def __init__(
        self,
        model: Any,
        chat: ChatFormat,
        *,
        device: torch.device,
        autocast: torch.dtype,
        activation_checkpointing: bool = False,
    ) -> None:
        self.model = model.to(device)
        use_products(model)
        use_gated_mlps(model)
        self.chat = chat
        self.tokenizer, self.images = chat.tokenizer, chat.images
        self.device, self.end_ids = device, chat.ends.ids
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._inner, self.decoder = inner, find_decoder(inner)
        leave_out_unread_tokens(self.decoder)
        # transformers 5.24 renamed the argument, model by model.
        arguments = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._takes_positions = "position_ids" in arguments
        self._embedding, self._head = inner.get_input_embeddings(), inner.get_output_embeddings()
        self._logit_transform = measure_logit_transform(inner, self.decoder)
        self.max_length = find_max_length(inner)
        self.num_layers: int = inner.config.get_text_config().num_hidden_layers
        self.reaches = find_reaches(inner.config.get_text_config())
        # `check_forward` chooses how the model is trained and sampled, and says of each faster way
        # that it leaves out why.
        self.packs_rows = self.padding_reason is None
        self.sampler = self.samplers[0]
        self.left_out: dict[str, str] = {}
        if self.sampler is Sampler.FAST:
            reason = fast_sampling().unsupported_reason(model, self.decoder)
            if reason is not None:
                self.sampler = Sampler.RAGGED
                self.left_out[Sampler.FAST] = reason
        self._autocast = autocast
        # Not for mixtures of experts: the loss that balances them would count the padding.
        self._pads_packed_rows = pads_rows(device, self.precision) and not has_routers(self.decoder)
        self._reference: list[torch.Tensor] | None = None
        self.teachers: dict[str, Policy] = {}  # by environment: other models, as the reference
        self._checkpointed: list[Any] = []
        if activation_checkpointing:
            layers = (m for m in inner.modules() if isinstance(m, GradientCheckpointingLayer))
            self._checkpointed = list(layers)
        for layer in self._checkpointed:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        self.model.eval()

    def __repr__(self) -> str:
        return f"Policy({self.num_parameters:,} parameters on {self.device})"

    @property
    def num_parameters(self) -> int:
        return sum(map(num_values, self.model.parameters()))

    def trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters that an optimizer may change."""
        return [item for item in self.model.named_parameters() if item[1].requires_grad]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()

    def save_model(self, folder: Path) -> None:
        """Write the weights, or the adapter alone, in the format of transformers or peft."""
        self.model.save_pretrained(folder)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, and the image processor if there is one."""
        self.tokenizer.save_pretrained(folder)
        if self.images is not None:
            self.images.save(folder)

    def load_model(self, folder: Path) -> None:
        """Load what `save_model` wrote for the same model and adapter settings."""
        if (folder / ADAPTER_CONFIG).exists():
            load_adapter(self.model, folder, self.device)
            return
        # transformers reads back its own names and file splits.
        saved = read_model(str(folder), dtype=next(self.model.parameters()).dtype)
        self.model.load_state_dict(saved.state_dict())

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Return the last hidden states [B, T, hidden size]; without a mask, causal attention."""
        with self._precision():
            return self.decoder(
                input_ids=token_ids,
                attention_mask=mask,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
                **({"position_ids": positions} if self._takes_positions else {}),
            ).last_hidden_state

    @property
    def attention(self) -> str:
        """The attention of all layers, as transformers calls it; `check_forward` may change it."""
        return self._inner.config._attn_implementation

    @attention.setter
    def attention(self, name: str) -> None:
        self._inner.set_attn_implementation(name)

    def new_cache(self) -> Any:
        """Return an empty cache of the model's own kind, in which all rows grow at once."""
        return DynamicCache(config=self.decoder.config)

    @property
    def samplers_left_out(self) -> dict[str, str]:
        """The faster ways to sample, and why each of them is not used."""
        return {name: why for name, why in self.left_out.items() if name in self.samplers}

    @property
    def is_small(self) -> bool:
        """Whether operations are too short for several cores: each then computes its own batch."""
        return self.device.type == "cpu" and self.num_parameters <= MAX_SMALL

    @property
    def samples_in_batches(self) -> bool:
        """Whether the passes of `row_forwards` may run at once, in several threads."""
        return self.sampler is Sampler.FAST and self.device.type == "cpu"

    def row_forwards(self, num: int) -> list[RowForward]:
        """Return forward passes for sampling with the current weights, with empty caches."""
        if self.sampler is Sampler.RAGGED:
            return [TransformersForward(self) for _ in range(num)]
        if self.sampler is Sampler.WHOLE:
            return [WholeForward(self) for _ in range(num)]
        if self.sampler is not Sampler.FAST:
            pads_rows = self.sampler is Sampler.PLAIN
            return [PlainForward(self, pads_rows=pads_rows) for _ in range(num)]
        return fast_sampling().forwards(self.decoder, self._head, self.precision, num)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of hidden states [..., hidden size]."""
        with self._precision():
            return self._logit_transform(self._head(hidden))

    def model_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of transformers' own forward pass, for comparison."""
        with self._precision(), own_attention(self._inner):
            return self.model(input_ids=token_ids, use_cache=False).logits

    def image_differences(self) -> dict[str, float]:
        """Return, by the name of a pass, how far its logprobs with images are from the model's."""
        return {}

    @property
    def precision(self) -> torch.dtype:
        """The precision of matrix products."""
        weights = next(self.model.parameters()).dtype
        return torch.bfloat16 if torch.bfloat16 in (weights, self._autocast) else torch.float32

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies [N] of the batch's trained tokens, in its order."""
        logprobs_U, entropy_U = self.predicted_logprobs(batch, temperature)
        return logprobs_U.index_select(0, batch.places), entropy_U.index_select(0, batch.places)

    def predicted_logprobs(
        self,
        batch: Batch,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        hidden_UH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprob of each predicted token and the entropy where it is predicted [U].

        Entropies have a gradient only if `entropy_gradient`. hidden_UH: see `predictors_hidden`.
        """
        return token_logprobs(
            self.predictors_hidden(batch) if hidden_UH is None else hidden_UH,
            batch.targets,
            head=self._head,
            transform=self._logit_transform,
            temperature=temperature,
            precision=self._autocast,
            entropy_gradient=entropy_gradient,
        )

    def predictors_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states [U, hidden size] that predict tokens."""
        return self.row_hidden(batch).index_select(0, batch.predictors)

    def row_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states [T, hidden size] of a batch's row.

        They are computed for the tokens that predict a trained one; those of others mean nothing.
        """
        if not self.packs_rows:
            return self._padded_hidden(batch)
        no_mask = torch.empty(1, 1, 1, 1, device=self.device)  # transformers uses 4-D masks as is
        length = max(len(sample.token_ids) for sample in batch.samples)
        row = batch.token_ids, batch.positions
        ids_T, positions_T = map(pad_row, row) if self._pads_packed_rows else row
        with self._precision(), self._checkpointing():
            hidden_1TH: torch.Tensor = self.decoder(
                inputs_embeds=embed(self._embedding, ids_T[None]),
                attention_mask=no_mask,
                position_ids=positions_T[None],
                use_cache=False,
                packed_row=PackedRow(batch.nodes, self.device, length, batch.finished),
            ).last_hidden_state
        return hidden_1TH[0, : len(batch.token_ids)]

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Within the block, checkpoint activations if the configuration asks for it.

        transformers checkpoints only in training mode, so the layers themselves, but not their
        parts with dropout, are switched to it. Checkpointing disables the cache, which the engine
        needs outside of the block.
        """
        before = [layer.training for layer in self._checkpointed]
        for layer in self._checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer, mode in zip(self._checkpointed, before, strict=True):
                layer.training = mode

    def _padded_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the same as `row_hidden`, from padded samples, which every attention supports."""
        assert not batch.is_shared, "this model's attention does not allow shared tokens"
        rows = [batch.token_ids[node.start : node.end] for node in batch.nodes]
        padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths_B1 = torch.tensor([[len(row)] for row in rows], device=self.device)
        is_token_BT = torch.arange(padded_BT.shape[1], device=self.device) < lengths_B1
        with self._checkpointing():
            return self._hidden_of_samples(padded_BT, batch)[is_token_BT]

    def _hidden_of_samples(self, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the last hidden states of a batch's samples as padded rows [B, T]."""
        return self.hidden(token_ids)

    def twin(self) -> "Policy":
        """Return a copy, which samples while this policy learns.

        The two share the tensors of parameters that are not trained.
        """
        shared: dict[int, Any] = {id(values): values for values in self.model.parameters()}
        for _, values in self.trained_parameters():
            del shared[id(values)]
        twin = self._like_this(copy.deepcopy(self.model, shared))
        twin.packs_rows = self.packs_rows
        twin.sampler = self.sampler
        return twin

    def with_own_gradients(self) -> "Policy":
        """Return a policy with the same weights, but gradients for another thread to compute.

        Changing weights in place changes both policies.
        """
        shared = [self.tokenizer, self.chat, self.images, *(self._reference or [])]
        for teacher in self.teachers.values():
            shared += teacher.model.parameters()
        memo: dict[int, Any] = {id(each): each for each in (*shared, *self.model.parameters())}
        for _, values in self.trained_parameters():
            memo[id(values)] = torch.nn.Parameter(values.detach())
        return copy.deepcopy(self, memo)

    def _like_this(self, model: Any) -> "Policy":
        """Return a policy with another model of the same kind."""
        return Policy(model, self.chat, device=self.device, autocast=self._autocast)

    @torch.no_grad()
    def follow(self, other: "Policy") -> None:
        """Copy the trained weights of a twin into this policy."""
        pairs = zip(self.trained_parameters(), other.trained_parameters(), strict=True)
        for (_, mine), (_, theirs) in pairs:
            mine.copy_(theirs)

    def keep_reference(self, weights: list[torch.Tensor] | None = None) -> None:
        """Set the reference of `reference_logprobs`: the present policy, or one with `weights`.

        Only trained parameters are copied: with an adapter, the adapter alone. If the adapter is
        still zero nothing is copied, because the model without it is the reference.
        """
        if weights is not None:
            self._reference = weights
        elif self._adapter_is_nothing():
            self._reference = []
        else:
            self._reference = [values.data.clone() for _, values in self.trained_parameters()]

    def _adapter_is_nothing(self) -> bool:
        """Return whether the adapter has no effect, as before the first step."""
        trained = self.trained_parameters()
        return all("lora_" in name for name, _ in trained) and not any(
            values.any() for name, values in trained if "_B." in name
        )

    @property
    def reference(self) -> list[torch.Tensor] | None:
        """The reference's trained weights; [] is the model without adapter, None no reference."""
        return self._reference

    def save_reference(self, file: Path) -> None:
        assert self._reference is not None
        save_file({str(number): each for number, each in enumerate(self._reference)}, file)

    def load_reference(self, file: Path) -> None:
        named = load_file(file, device=str(self.device))
        self.keep_reference([named[str(number)] for number in range(len(named))])

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """Return logprobs [N] of the reference. Do not call it between forward and backward."""
        if self.teachers:
            return self.teachers[batch.env].logprobs(batch, temperature)[0]
        with self.as_reference():
            return self.logprobs(batch, temperature)[0]

    def as_reference(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block within which this policy computes as the reference."""
        weights = self._reference
        assert weights is not None, "keep_reference was not called"
        return self.lent_weights(weights) if weights else self.model.disable_adapter()

    @contextlib.contextmanager
    def lent_weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Within the block, use other values for the trained parameters, without copying."""
        parameters = [parameter for _, parameter in self.trained_parameters()]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, values in zip(parameters, weights, strict=True):
                parameter.data = values
            yield
        finally:
            for parameter, values in zip(parameters, own, strict=True):
                parameter.data = values

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)
