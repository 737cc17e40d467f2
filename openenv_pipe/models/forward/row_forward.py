"""Forward passes for sampling: rows of tokens, whose keys and values are cached.

Shape letters: R rows (conversations), Q new tokens of a forward pass, V vocabulary.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import torch

from openenv_pipe.models.forward.attention.reach import Reach, layer_masks
from openenv_pipe.models.forward.kv_cache import RaggedCache
from openenv_pipe.types import NO_IMAGES, Images

Rows = Sequence[Sequence[int]]  # token ids of each row


class Sampler(StrEnum):
    """The forward passes for sampling, fastest first. `forward_check` chooses one by measuring."""

    FAST = "fast"  # models.forward.fast_forward
    RAGGED = "ragged"  # the model's modules, with a cache in which rows grow at different rates
    PLAIN = "plain"  # the model's own forward pass and cache; each turn computes its row again
    PLAIN_EQUAL = "plain, rows of equal length"  # the same, without padding
    WHOLE = "whole rows"  # no cache: each token computes its row again


class RowForward(Protocol):
    """A forward pass over the rows of its own cache. A row's tokens are fed in their order."""

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for at least so many rows."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite the target rows with the source rows as they were before the call."""

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        """Feed to each row r its new tokens, at least one, from position starts[r] on.

        images: those in the new tokens, for a vision-language model.

        Returns the logits [R, V] after each row's last token.
        """

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Feed one token to each of the first R rows; return the logits [R, V] after it."""


class CachedModel(Protocol):
    """The interface of a model for `TransformersForward`, as in `models.policy.Policy`."""

    device: torch.device
    num_layers: int
    reaches: dict[str, Reach]  # of each kind of layer

    def hidden(
        self,
        token_ids_RQ: torch.Tensor,
        positions_RQ: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        cache: RaggedCache,
    ) -> torch.Tensor:
        """Compute the last hidden states, [R, Q, hidden size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., V] of hidden states [..., hidden size]."""


class TransformersForward:
    """The forward pass of transformers' own modules, for attention to earlier tokens."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self._cache = RaggedCache(model.num_layers)

    def reserve_rows(self, num_rows: int) -> None:
        self._cache.reserve_rows(num_rows)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._cache.copy_rows(self._tensor(sources), self._tensor(targets))

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        assert not images, "this model reads text alone"
        return self._forward(*self._in_rows(new_ids, starts))

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        return self._forward(token_ids_R[:, None], positions_R[:, None], positions_R.new_zeros(1))

    def _in_rows(
        self, new_ids: Rows, starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return padded ids [R, Q], their places in the cache, and each row's last one [R]."""
        width = max(map(len, new_ids))
        ids_RQ = self._tensor([[*ids, *[0] * (width - len(ids))] for ids in new_ids])
        places_RQ = self._tensor(starts)[:, None] + self._tensor(range(width))
        return ids_RQ, places_RQ, self._tensor([len(ids) - 1 for ids in new_ids])

    def _forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, last_R: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits [R, V] at each row's place last_R.

        Padding has the position of its row's last token, because the model may have none behind it.
        """
        causal_R1QK = self._cache.write_at(positions_RQ)
        mask = layer_masks(self._model.reaches, causal_R1QK, positions_RQ)
        highest_R1 = positions_RQ[self._tensor(range(len(positions_RQ))), last_R][:, None]
        positions_RQ = torch.minimum(positions_RQ, highest_R1)
        hidden_RQ = self._model.hidden(ids_RQ, positions_RQ, mask, self._cache)
        return self._last_logits(hidden_RQ, last_R)

    def _last_logits(self, hidden_RQ: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RQ[self._tensor(range(len(hidden_RQ))), last_R])

    def _tensor(self, values: Sequence[int] | Rows) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)
