"""The keys of the reward term `verifier`."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from openenv_pipe.config.schema.base import (
    Block,
    HeaderName,
    HeaderValue,
    NumRetries,
    PositiveCount,
    PythonTarget,
    Seconds,
    ServerUrl,
    Share,
)
from openenv_pipe.config.schema.reward_terms import NumbersTerm

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
