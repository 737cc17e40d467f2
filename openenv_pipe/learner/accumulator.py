"""Sums and maxima over the batches of a step, accumulated on the device until they are read.

Callers choose the names of what they count.
"""

from collections.abc import Sequence

import torch

Values = tuple[dict[str, float], dict[str, float]]  # sums and maxima


class MetricAccumulator:
    """Accumulates in float64, so that the split into batches changes no printed digit."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._highest: dict[str, torch.Tensor] = {}

    def add(self, **values: torch.Tensor | float) -> None:
        """Add each value to the sum of its name; of a tensor, the sum of its entries."""
        for name, value in values.items():
            total = torch.as_tensor(value).detach().sum().double()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def highest(self, **values_N: torch.Tensor) -> None:
        """Keep the largest entry of each name; an empty tensor changes nothing."""
        for name, values in values_N.items():
            if values.numel():
                top = values.detach().max().double()
                self._highest[name] = torch.maximum(self._highest.get(name, top), top)

    def merge(self, other: "MetricAccumulator") -> None:
        """Add the sums of another accumulator, and keep its larger maxima."""
        self.add(**other._sums)
        for name, top in other._highest.items():
            self.highest(**{name: top[None]})

    def values(self) -> Values:
        sums = {name: total.item() for name, total in self._sums.items()}
        return sums, {name: top.item() for name, top in self._highest.items()}

    def replace(self, parts: Sequence[Values]) -> None:
        """Replace the content by the values of several accumulators, added in their order."""
        self._sums, self._highest = {}, {}
        for sums, highest in parts:
            self.add(**{name: torch.tensor(value).double() for name, value in sums.items()})
            self.highest(**{name: torch.tensor([value]) for name, value in highest.items()})

    def sum(self, name: str) -> float:
        return self._sums[name].item() if name in self._sums else 0.0

    def max(self, name: str) -> float:
        """The largest entry of a name; 0 for a name that was never seen."""
        return self._highest[name].item() if name in self._highest else 0.0

    def has(self, name: str) -> bool:
        return name in self._sums
