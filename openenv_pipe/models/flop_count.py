"""Count the floating point operations of a model's passes from its dimensions, without torch.

Only the model's matrix products count, each once: recomputation that saves memory, norms,
softmaxes, the optimizer and the experts of a mixture are left out.
"""

from dataclasses import dataclass

from openenv_pipe.models.memory_estimate import Shape, num_in_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    num_tokens: int  # tokens that go through the decoder
    num_contexts: int  # tokens that each of them attends to, itself included, summed
    num_finished: int  # tokens that go through the last layer's MLP
    num_predicted: int  # tokens that go through the head


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    num_weights: int  # of the decoder's matrices, adapters included
    num_last_weights: int  # of them, those that only finished tokens go through
    num_head_weights: int
    attention_width: int  # all query heads of all layers together
    trains_all: bool  # False: the model's own weights are frozen under an adapter

    @classmethod
    def of_shape(cls, shape: Shape, *, trains_all: bool) -> "FlopCount":
        """Count for a model that is not loaded. The adapter's own products are left out."""
        return cls(
            num_weights=num_in_layers(shape),
            num_last_weights=3 * shape.hidden_size * shape.intermediate_size,
            num_head_weights=shape.hidden_size * shape.vocabulary,
            attention_width=shape.num_layers * shape.attention_width,
            trains_all=trains_all,
        )

    def forward(self, size: Size) -> int:
        return self._matrices(size) + self._attention(size)

    def forward_and_backward(self, size: Size) -> int:
        """Count a forward and a backward pass.

        The backward pass makes two products for each of the forward pass, one for each factor's
        gradient, and only one if a factor is a frozen weight.
        """
        return (3 if self.trains_all else 2) * self._matrices(size) + 3 * self._attention(size)

    def _matrices(self, size: Size) -> int:
        before = (self.num_weights - self.num_last_weights) * size.num_tokens
        last = self.num_last_weights * size.num_finished
        return 2 * (before + last + self.num_head_weights * size.num_predicted)

    def _attention(self, size: Size) -> int:
        """Count the products of queries with keys and of probabilities with values."""
        return 4 * self.attention_width * size.num_contexts
