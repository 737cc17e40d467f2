"""What an engine is: token ids in, token ids and their logprobs out."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import EngineCapabilities
from openenv_pipe.types import Finish, Observation, Opening


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion of one episode."""

    episode: int  # its number in the collection; the engine keeps its conversation under it
    turn: int  # completions of the episode before this one
    new_ids: Sequence[int]  # prompt ids since the last completion: the engine has the rest
    max_tokens: int
    temperature: float  # 0: greedy
    seed: int  # of the episode; token k of an episode depends on (seed, k) and the logits alone
    observations: Sequence[Observation]  # of the episode so far; only scripted policies read them,
    opening: Opening  # and how it began
    group_seed: int | None = None  # the same for all members of its group; None: it has no group
    member: int = 0  # its number in the group


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was sampled."""

    token_ids: list[int]  # the end token included if it was sampled
    logprobs: list[float]  # of token_ids, at the temperature
    finish: Finish
    policy_versions: list[int]  # those that sampled it, in order


class Engine(Protocol):
    """Serves the episodes of one collection at a time, of several where it publishes in flight.

    `expect`, then `generate` any number of times per episode, then `finish` once per episode.
    """

    capabilities: EngineCapabilities
    max_episodes: int  # how many episodes it serves at once

    def expect(self, num_episodes: int, limit: int) -> int:
        """A collection of so many episodes begins, of which at most `limit` play at once.

        Returns the number of its first episode; the others follow.
        """

    async def generate(self, request: Request) -> Completion:
        """Continues an episode's conversation. Raises EngineError."""

    def finish(self, episode: int) -> None:
        """The episode needs no more completions; what is kept of it can go."""

    async def begin_update(self, *, idle: bool) -> None:
        """The policy changes from now on, until the next `publish`.

        idle: nothing is sampled meanwhile, so that memory may go to the learner.
        """

    async def publish(self, version: int) -> None:
        """The policy has changed; completions from now on are of this version.

        Raises EngineError, and TrainingError where the sampler has another policy afterwards.
        """

    async def metrics(self) -> Mapping[str, float]:
        """What was measured since the last call, by names for a step's record."""

    def facts(self) -> Mapping[str, JsonValue]:
        """What the run's record should say of it."""


def turn_seed(episode_seed: int, turn: int) -> int:
    """A seed below 2**63 for one completion, where a server draws the random numbers."""
    digest = hashlib.sha256(f"{episode_seed}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
