"""`judge`: the model that scores episodes for the reward terms that need a judge."""

from typing import Annotated, Any, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    NonNegative,
    NumRetries,
    Positive,
    PositiveCount,
    PositiveShare,
    Seconds,
    Share,
    Variables,
)
from openenv_pipe.config.schema.endpoint import EndpointBlock


class NoJudgeConfig(Block):
    """No term of the reward needs a judge."""

    type: Literal["none"]


class VerdictsBlock(Block):
    """How a judge's model is asked, and what that may cost."""

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


class OpenAIJudgeConfig(EndpointBlock, VerdictsBlock):
    """A model behind a chat completions endpoint (conf/judge/openai.yaml)."""

    type: Literal["openai"]


class VllmJudgeConfig(VerdictsBlock):
    """A model that the run serves with vLLM, for as long as it goes on (conf/judge/vllm.yaml)."""

    type: Literal["vllm"]
    model: str = Field(description="the model to serve: a folder, or an id on a model hub")
    revision: str | None = Field(description="of a model on a hub; null: its newest")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        description="the server's precision; auto: the model's own"
    )
    max_model_len: PositiveCount = Field(
        description="tokens of the longest prompt with its answer that the server accepts"
    )
    gpu_memory_share: PositiveShare = Field(
        description="fraction of a GPU's memory for the server, weights included"
    )
    arguments: list[str] = Field(description="further command-line arguments of the server")
    variables: Variables = Field(
        description="further environment variables of the server, such as CUDA_VISIBLE_DEVICES; "
        "null: the value that this process has"
    )
    start_timeout_s: Seconds = Field(description="time limit of the server's start")
    max_concurrent: PositiveCount = Field(description="requests in flight at once")
    parameters: dict[str, Any] = Field(
        description="further fields of each request, which replace ours; null removes a field"
    )
    timeout_s: Seconds = Field(description="time limit of one request")
    max_retries: NumRetries = Field(description="how often a failed request is repeated")

    def endpoint(self, base_url: str, api_key: str | None) -> OpenAIJudgeConfig:
        """Return the judge as the endpoint of a server that has started."""
        given = self.model_dump(include=set(OpenAIJudgeConfig.model_fields) - {"type"})
        return OpenAIJudgeConfig(
            **given,
            type="openai",
            base_url=base_url,
            api_key=api_key,
            requests_per_minute=None,
            tokens_per_minute=None,
            max_tokens_key="max_tokens",
        )


JudgeConfig = Annotated[
    NoJudgeConfig | OpenAIJudgeConfig | VllmJudgeConfig, Field(discriminator="type")
]
