"""Keys of a judge that have no effect."""

from openenv_pipe.config.unused_keys import IneffectiveKeys
from openenv_pipe.extras.judges.schema import VerdictsBlock

RULES = (
    IneffectiveKeys(
        keys=("judge.max_cost",),
        because=("judge.price_per_million_prompt_tokens", "judge.price_per_million_answer_tokens"),
        applies=lambda config: (
            isinstance(config.judge, VerdictsBlock)
            and config.judge.max_cost is not None
            and not config.judge.price_per_million_prompt_tokens
            and not config.judge.price_per_million_answer_tokens
        ),
        advice="what costs nothing is never spent; set the prices",
    ),
    IneffectiveKeys(
        keys=("judge.when_spent",),
        because=("judge.max_calls", "judge.max_tokens", "judge.max_cost"),
        applies=lambda config: (
            isinstance(config.judge, VerdictsBlock)
            and config.judge.max_calls is config.judge.max_tokens is config.judge.max_cost is None
        ),
        advice="set one of them",
    ),
)
