"""The types of reward terms whose numbers have names: of the environment, or of a verifier."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from openenv_pipe.config.schema.base import (
    Block,
    HeaderName,
    HeaderValue,
    Number,
    NumRetries,
    PositiveCount,
    PythonTarget,
    Seconds,
    ServerUrl,
    Share,
)
from openenv_pipe.config.schema.reward_terms import Term

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NumbersTerm(Term):
    """Base of the terms whose value is the weighted sum of named numbers, times the gates.

    Each of the numbers is a metric.
    """

    per_turn: Literal[False] = Field(description="the numbers are about the whole episode")
    weights: dict[str, Number] | None = Field(
        description="the numbers that are added up, with their factors; null: all, each with 1.0"
    )
    gates: list[str] = Field(description="the numbers that multiply the sum of the others")

    @model_validator(mode="after")
    def _gates_have_no_weight(self) -> Self:
        if set(self.gates) & set(self.weights or {}) or len(set(self.gates)) < len(self.gates):
            raise ValueError(
                f"gates={self.gates} with weights={[*(self.weights or {})]}: a gate multiplies the "
                "sum of the others; name each gate once, and none in weights"
            )
        return self


class RubricTerm(NumbersTerm):
    """Numbers that the environment reports in its observations, each with its last value.

    They are the scores of its rubrics (`metadata.rubric_scores`) by their names, and fields of
    observations by their paths, such as `board.score`.
    """

    type: Literal["rubric"]
    when_missing: Number | None = Field(
        description="stands for a number that was not reported in an episode; null: the episode "
        "has no reward"
    )


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
