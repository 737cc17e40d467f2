"""The policy: a causal language model, with or without an adapter, that samples and learns.

Shape letters: B rows, T tokens, N trained tokens of a batch, U of them to compute.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from openenv_pipe.chat import ChatFormat
from openenv_pipe.learner.attention import PackedRow
from openenv_pipe.learner.logprobs import token_logprobs
from openenv_pipe.types import Batch


class Policy:
    """A transformers model and its chat format on one device.

    `model` may be wrapped by peft. The forward passes of sampling and of learning are the same
    modules in the same precision, so that their logprobs agree.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, device: torch.device, autocast: torch.dtype
    ) -> None:
        self.model = model.to(device)
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)
        self.device = device
        self.end_id = self.chat.end_id
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder = inner.get_decoder()
        self._head = inner.get_output_embeddings()
        text = inner.config.get_text_config()
        self.num_layers = text.num_hidden_layers
        self.max_length: int | None = getattr(text, "max_position_embeddings", None)
        self.packs_rows = True  # the canary says whether the architecture allows it
        self._autocast = autocast
        self._reference: list[torch.Tensor] | None = None
        self.model.eval()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that an optimizer may change."""
        return [item for item in self.model.named_parameters() if item[1].requires_grad]

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Last hidden states [B, T, hidden size]; without positions and mask, plainly causal."""
        with self._precision():
            return self._decoder(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            ).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._precision():
            return self._head(hidden)

    def model_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] as transformers computes them: what all else has to agree with."""
        with self._precision():
            return self.model(input_ids=token_ids, use_cache=False).logits

    @property
    def precision(self) -> torch.dtype:
        """That of the matrix products."""
        weights = next(self.model.parameters()).dtype
        return torch.bfloat16 if torch.bfloat16 in (weights, self._autocast) else torch.float32

    def logprobs(
        self, batch: Batch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies [N] of the batch's trained tokens, in its order.

        Entropies have a gradient only if it is asked for.
        """
        logprobs_U, entropy_U = token_logprobs(
            self.row_hidden(batch).index_select(0, batch.predictors),
            batch.targets,
            head=self._head,
            temperature=temperature,
            precision=self._autocast,
            entropy_gradient=entropy_gradient,
        )
        return logprobs_U.index_select(0, batch.places), entropy_U.index_select(0, batch.places)

    def row_hidden(self, batch: Batch) -> torch.Tensor:
        """Last hidden states [T, hidden size] of a batch's row."""
        if not self.packs_rows:
            return self._padded_hidden(batch)
        no_mask = torch.empty(1, 1, 1, 1, device=self.device)  # four dimensions: taken as it is
        with self._precision():
            return self._decoder(
                input_ids=batch.token_ids[None],
                attention_mask=no_mask,
                position_ids=batch.positions[None],
                use_cache=False,
                packed_row=PackedRow(batch.nodes, self.device),
            ).last_hidden_state[0]

    def _padded_hidden(self, batch: Batch) -> torch.Tensor:
        """The same without any attention of ours: samples side by side, padded on the right."""
        assert not batch.is_shared, "this model attends in a way that allows no shared tokens"
        rows = [batch.token_ids[node.start : node.end] for node in batch.nodes]
        padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths_B1 = torch.tensor([[len(row)] for row in rows], device=self.device)
        is_token_BT = torch.arange(padded_BT.shape[1], device=self.device) < lengths_B1
        return self.hidden(padded_BT)[is_token_BT]

    def keep_reference(self, weights: list[torch.Tensor] | None = None) -> None:
        """From now on `reference_logprobs` answers for the policy as it is, or with `weights`.

        Only what is trained is copied: the adapter where there is one, never the model under it.
        """
        own = (parameter.data.clone() for _, parameter in self.trained_parameters())
        self._reference = list(own) if weights is None else weights

    @property
    def reference(self) -> list[torch.Tensor] | None:
        """The reference's values of the trained parameters, None if none is kept."""
        return self._reference

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """Logprobs [N] of the reference. Not between a forward pass and its backward pass."""
        assert self._reference is not None, "keep_reference was not called"
        with self._lent_weights(self._reference):
            return self.logprobs(batch, temperature)[0]

    @contextlib.contextmanager
    def _lent_weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """The trained parameters hold other values inside; nothing is copied."""
        own = [parameter.data for _, parameter in self.trained_parameters()]
        self._hold(weights)
        try:
            yield
        finally:
            self._hold(own)

    def _hold(self, weights: list[torch.Tensor]) -> None:
        for (_, parameter), values in zip(self.trained_parameters(), weights, strict=True):
            parameter.data = values

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Dropout, where the model has any, acts inside only.

        For imitation: ratios to a sampler without dropout would be noise.
        """
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)
