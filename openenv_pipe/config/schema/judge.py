"""`judge`: the model that scores episodes for the reward terms that need a judge."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    NonNegative,
    NumRetries,
    Positive,
    PositiveCount,
    Share,
)
from openenv_pipe.config.schema.endpoint import EndpointBlock


class NoJudgeConfig(Block):
    """No term of the reward needs a judge."""

    type: Literal["none"]


class OpenAIJudgeConfig(EndpointBlock):
    """A model behind a chat completions endpoint (conf/judge/openai.yaml)."""

    type: Literal["openai"]
    max_reply_tokens: PositiveCount = Field(description="the longest answer, in tokens")
    answer_format: Literal["json_schema", "text"] = Field(
        description="json_schema: the endpoint enforces the answer's JSON schema; text: the prompt "
        "asks for JSON, for endpoints that know no schemas"
    )
    max_repairs: NumRetries = Field(
        description="how often the judge is told that its answer cannot be used, and asked again"
    )
    max_failed_share: Share = Field(
        description="a step or an evaluation in which a larger share of the episodes gets no "
        "verdict ends the run"
    )
    max_calls: PositiveCount | None = Field(description="answers that a run may ask for; null: any")
    max_tokens: PositiveCount | None = Field(
        description="tokens of prompts and answers that a run may spend; null: any"
    )
    max_cost: Positive | None = Field(
        description="what a run may spend, in the unit of the two prices; null: any"
    )
    price_per_million_prompt_tokens: NonNegative = Field(description="for judge/cost")
    price_per_million_answer_tokens: NonNegative = Field(description="for judge/cost")
    when_spent: Literal["end", "continue"] = Field(
        description="what happens when the budget is spent; end: the run ends; continue: it goes "
        "on without the terms that need the judge"
    )


JudgeConfig = Annotated[NoJudgeConfig | OpenAIJudgeConfig, Field(discriminator="type")]
