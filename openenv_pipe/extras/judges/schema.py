"""The keys of judges, and of the reward terms that they decide."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from openenv_pipe.config.schema.base import (
    Block,
    HeaderName,
    HeaderValue,
    NonNegative,
    Number,
    NumRetries,
    Positive,
    PositiveCount,
    PositiveShare,
    PythonTarget,
    Seconds,
    ServerUrl,
    Share,
    Variables,
)
from openenv_pipe.config.schema.endpoint import EndpointBlock
from openenv_pipe.config.schema.judge import JudgeBlock
from openenv_pipe.config.schema.reward_terms import NumbersTerm, Term

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_FILE_BYTES = 2**20  # of a file of criteria


def _encrypted_or_local(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise ValueError(
            f"{url!r} sends episodes without encryption; expected https://, or http:// on this "
            f"machine ({', '.join(LOOPBACK)})"
        )
    return url


class HttpVerifier(Block):
    """An endpoint that each episode is posted to, as JSON."""

    type: Literal["http"]
    url: Annotated[ServerUrl, AfterValidator(_encrypted_or_local)]
    headers: dict[HeaderName, HeaderValue] = Field(
        description="HTTP headers of every request, such as Authorization"
    )
    max_retries: NumRetries = Field(description="how often a failed request is repeated")


class PythonVerifier(PythonTarget):
    """A function `target(episode, **options)`, which may be asynchronous."""


class VerifierTerm(NumbersTerm):
    """What a verifier says of each episode: a number, or numbers by name; null: no reward.

    A verifier that fails leaves the episode without a reward.
    """

    replaces_reward = True
    type: Literal["verifier"]
    source: Annotated[HttpVerifier | PythonVerifier, Field(discriminator="type")]
    timeout_s: Seconds = Field(description="time limit of one request, or of one call")
    max_concurrent: PositiveCount = Field(description="requests or calls at once")
    max_failed_share: Share = Field(
        description="a step or an evaluation in which a larger share of the episodes gets no "
        "value ends the run"
    )


ASKED = ("model", "parameters", "max_reply_tokens", "answer_format", "max_repairs")


class VerdictsBlock(JudgeBlock):
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

    verdict_keys = (*ASKED, "base_url")
    type: Literal["openai"]


class VllmJudgeConfig(VerdictsBlock):
    """A model that the run serves with vLLM, for as long as it goes on (conf/judge/vllm.yaml)."""

    verdict_keys = (*ASKED, "revision", "dtype", "max_model_len", "arguments")
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


class RulerTerm(Term):
    """A judge compares the episodes of a group and gives each of them a number in 0..1 (RULER).

    Groups with one episode, as in most evaluations, have nothing to compare and no value.
    """

    asks_judge = True
    replaces_reward = True
    is_relative = True
    type: Literal["ruler"]
    per_turn: Literal[False] = Field(description="a verdict is about the whole episode")
    rubric: str = Field(description="what makes an episode better, in words for the judge")
    num_orders: Annotated[int, Field(ge=1, le=100)] = Field(
        description="in how many random orders the episodes are shown; their scores are averaged"
    )
    max_group: Annotated[int, Field(ge=4, le=1000)] = Field(
        description="episodes in one prompt; larger groups are split, with two episodes in all "
        "parts that make their scores comparable"
    )


class Criterion(Block):
    """A question that a judge answers about an episode, or about each of its turns."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]{0,63}$")]
    text: str = Field(description="what to look at, in words for the judge")
    choices: list[str] = Field(
        description="the possible answers from worst (0) to best (1); []: a number in 0..1"
    )
    weight: Number = Field(description="factor in the term's sum; not used for a gate")
    gate: bool = Field(description="true: the sum of the others is multiplied by the answer")

    @field_validator("choices")
    @classmethod
    def _differ(cls, choices: list[str]) -> list[str]:
        if len(choices) == 1:
            raise ValueError(f"got the one choice {choices[0]!r}; expected [] or at least two")
        if len({choice.strip().casefold() for choice in choices} - {""}) != len(choices):
            raise ValueError("two choices are equal, or one is empty; expected different words")
        return choices


def _read_criteria(value: Any) -> Any:
    """Return the criteria in a file, if the value is its path."""
    if not isinstance(value, str):
        return value
    expected = 'expected a list, or the path of a .toml or .json file with a list "criteria"'
    path = Path(value).expanduser()
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"there is no file of at most {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        return found["criteria"]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = "it has no list of that name" if isinstance(error, LookupError | TypeError) else error
        raise ValueError(f"{value!r:.200}: {why}; {expected}") from None


class JudgeTerm(Term):
    """A judge scores each episode by criteria: their weighted sum, times those that are gates."""

    asks_judge = True
    replaces_reward = True
    type: Literal["judge"]
    criteria: Annotated[
        list[Criterion], BeforeValidator(_read_criteria), Field(min_length=1, max_length=64)
    ] = Field(description="a list, or the path of a .toml or .json file with the list `criteria`")
    reference: str | None = Field(
        description="the task's reset keyword, or column, with the right answer for the judge; "
        "null: none"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "JudgeTerm":
        names = [criterion.name for criterion in self.criteria]
        if "transformed" in names or len(set(names)) < len(names):
            raise ValueError(
                f"criteria are named {', '.join(names)}; expected a different name for each, "
                "and not `transformed`, which is reserved"
            )
        return self
