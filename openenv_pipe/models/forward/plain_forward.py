"""Sampling with the model's own forward pass and cache, as transformers' `generate` does it.

For models that `RaggedCache` does not fit, such as those with recurrent layers. Their state cannot
go back to an earlier token, so that each turn computes all of its row again, once for equal rows.
`WholeForward` is for models whose own cache is missing or inexact.

Shape letters: R rows (conversations), P rows of a part, W tokens of its longest row, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from openenv_pipe.models.forward.row_forward import Rows
from openenv_pipe.types import NO_IMAGES, Images

if TYPE_CHECKING:
    from openenv_pipe.models.policy import Policy


class WholeForward:
    """A `RowForward` without a cache: each token computes its row again, as the learner does."""

    def __init__(self, model: "Policy") -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def reserve_rows(self, num_rows: int) -> None:
        self._rows += [[] for _ in range(num_rows - len(self._rows))]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        rows = [list(self._rows[source]) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            self._rows[target] = row

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        assert not images, "this model reads text alone"
        for row, ids, start in zip(self._rows, new_ids, starts, strict=False):
            row[start:] = ids
        rows = [torch.tensor(row) for row in self._rows[: len(new_ids)]]
        ids_RW = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._model.device)
        ends_R = torch.tensor([len(row) - 1 for row in rows], device=self._model.device)
        hidden_RW = self._model.hidden(ids_RW)  # What follows a row's end has no effect on it.
        rows_R = torch.arange(len(rows), device=self._model.device)
        return self._model.logits(hidden_RW[rows_R, ends_R])

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        return self.feed(token_ids_R[:, None].tolist(), positions_R.tolist())


class _Part:
    """Rows that are computed together, padded on the left, and their cache."""

    def __init__(self, model: "Policy", rows: Rows) -> None:
        self._model = model
        self._cache = model.new_cache()
        self._num_rows = len(rows)
        width = max(map(len, rows))
        ids = [[*[0] * (width - len(row)), *row] for row in rows]
        lengths_P1 = torch.tensor([[len(row)] for row in rows], device=model.device)
        places_W = torch.arange(width, device=model.device) - width
        self._ids_PW = torch.tensor(ids, device=model.device)
        self._mask_PW = (places_W >= -lengths_P1).long()
        self._positions_PW = (places_W + lengths_P1).clamp(min=0)

    def begin(self) -> torch.Tensor:
        """Return the logits [P, V] after the rows."""
        return self._forward(self._ids_PW, self._positions_PW)

    def step(
        self, slots: Sequence[int], ids_P: torch.Tensor, positions_P: torch.Tensor
    ) -> torch.Tensor:
        """Continue the rows at these slots by a token each; return the logits [P, V]."""
        if slots != list(range(self._num_rows)):
            kept_P = torch.tensor(slots, device=self._model.device)
            self._cache.reorder_cache(kept_P)
            self._mask_PW = self._mask_PW[kept_P]
            self._num_rows = len(slots)
        self._mask_PW = torch.cat([self._mask_PW, self._mask_PW.new_ones(len(slots), 1)], dim=1)
        return self._forward(ids_P[:, None], positions_P[:, None])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self._model.hidden(ids, positions, self._mask_PW, self._cache)
        return self._model.logits(hidden[:, -1])


class PlainForward:
    """A `RowForward` that keeps the tokens of its rows, and computes them again at each turn."""

    def __init__(self, model: "Policy", *, pads_rows: bool) -> None:
        """pads_rows: whether rows of different lengths are computed together."""
        self._model = model
        self._pads_rows = pads_rows
        self._rows: list[list[int]] = []
        self._parts: list[_Part] = []
        self._slots: list[tuple[int, int]] = []  # of each row: its part, and its place in there

    def reserve_rows(self, num_rows: int) -> None:
        self._rows += [[] for _ in range(num_rows - len(self._rows))]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        rows, slots = list(self._rows), list(self._slots)
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = list(rows[source])
            if source < len(slots) and target < len(slots):
                self._slots[target] = slots[source]

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        assert not images, "this model reads text alone"
        equal: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the numbers of equal rows
        for number, (ids, start) in enumerate(zip(new_ids, starts, strict=True)):
            self._rows[number][start:] = ids
            equal[tuple(self._rows[number])].append(number)
        together: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for row in equal:
            together[0 if self._pads_rows else len(row)].append(row)
        self._parts, self._slots = [], [(0, 0)] * len(new_ids)
        order, logits = [], []
        for part, rows in enumerate(together.values()):
            self._parts.append(_Part(self._model, rows))
            counts_P = torch.tensor([len(equal[row]) for row in rows], device=self._model.device)
            logits.append(self._parts[-1].begin().repeat_interleave(counts_P, dim=0))
            for slot, row in enumerate(rows):
                order += equal[row]
                for number in equal[row]:
                    self._slots[number] = part, slot
        return torch.cat(logits)[self._inverse(order)]

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        del self._slots[len(token_ids_R) :]  # rows that are done
        fed = zip(token_ids_R.tolist(), positions_R.tolist(), strict=True)
        for number, (token_id, position) in enumerate(fed):
            self._rows[number][position:] = [token_id]
        together: dict[int, list[int]] = defaultdict(list)
        for number, (part, _) in enumerate(self._slots):
            together[part].append(number)
        order, logits = [], []
        for part, numbers in together.items():
            slots = [self._slots[number][1] for number in numbers]
            chosen = torch.tensor(numbers, device=token_ids_R.device)
            found = self._parts[part].step(slots, token_ids_R[chosen], positions_R[chosen])
            logits.append(found)
            order += numbers
            for slot, number in enumerate(numbers):
                self._slots[number] = part, slot
        return torch.cat(logits)[self._inverse(order)]

    def _inverse(self, order: Sequence[int]) -> torch.Tensor:
        return torch.tensor(order, device=self._model.device).argsort()
