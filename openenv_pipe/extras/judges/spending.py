"""What a run has spent on its judge, and the budget."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openenv_pipe.engines.openai import num_reported_tokens
from openenv_pipe.extras.judges.schema import VerdictsBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The tokens of one answer and its prompt, and what they cost."""

    num_tokens: int
    cost: float


class Spending:
    """Adds up what answers cost. Requests in flight may exceed the limits of tokens and cost."""

    def __init__(self, config: VerdictsBlock, paid: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config = config
        self._num_calls = 0
        self._num_tokens = 0
        self._cost = 0.0
        for answer in paid:
            self._num_calls += 1
            self.add(self.price(answer))

    def begin_call(self) -> None:
        self._num_calls += 1

    def add(self, price: Price) -> None:
        self._num_tokens += price.num_tokens
        self._cost += price.cost

    def price(self, answer: Mapping[str, Any]) -> Price:
        """Return what an answer cost, by the usage that the endpoint reports; without it 0."""
        num_prompt = num_reported_tokens(answer, "prompt_tokens") or 0
        num_answer = num_reported_tokens(answer, "completion_tokens") or 0
        config = self._config
        cost = (
            num_prompt * config.price_per_million_prompt_tokens
            + num_answer * config.price_per_million_answer_tokens
        ) / 1e6
        return Price(num_tokens=num_prompt + num_answer, cost=cost)

    def exceeded(self) -> str | None:
        """Return the limit that is reached, as `judge.max_calls=8`, or None."""
        spent = {
            "max_calls": self._num_calls,
            "max_tokens": self._num_tokens,
            "max_cost": self._cost,
        }
        for key, amount in spent.items():
            limit = getattr(self._config, key)
            if limit is not None and amount >= limit:
                return f"judge.{key}={limit:g}"
        return None
