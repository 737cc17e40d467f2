"""Keys of a judge that have no effect."""

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.unused_keys import IneffectiveKeys
from openenv_pipe.extras.judges.schema import VerdictsBlock


def _costs_nothing(config: RunConfig) -> bool:
    judge = config.judge
    return (
        isinstance(judge, VerdictsBlock)
        and judge.max_cost is not None
        and not judge.price_per_million_prompt_tokens
        and not judge.price_per_million_answer_tokens
    )


def _has_no_budget(config: RunConfig) -> bool:
    judge = config.judge
    return (
        isinstance(judge, VerdictsBlock)
        and judge.max_calls is judge.max_tokens is judge.max_cost is None
    )


RULES = (
    IneffectiveKeys(
        keys=("judge.max_cost",),
        because=("judge.price_per_million_prompt_tokens", "judge.price_per_million_answer_tokens"),
        applies=_costs_nothing,
        advice="what costs nothing is never spent; set the prices",
    ),
    IneffectiveKeys(
        keys=("judge.when_spent",),
        because=("judge.max_calls", "judge.max_tokens", "judge.max_cost"),
        applies=_has_no_budget,
        advice="set one of them",
    ),
)
