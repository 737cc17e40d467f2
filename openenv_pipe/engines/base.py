"""The interface of engines, and the types of their requests and answers.

An engine's `capabilities.takes` determines the types of its requests and answers:

    token_ids       TokenRequest        -> Completion, with token ids and logprobs
    messages        MessageRequest      -> TextReply
    observations    ObservationRequest  -> TextReply
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import EngineCapabilities, RunConfig
from openenv_pipe.types import Finish, Image, Images, Message, Observation, Opening, Tool

if TYPE_CHECKING:
    from openenv_pipe.models.policy import Policy


BYTES_PER_TOKEN = 4  # of English text, about
PIXELS_PER_TOKEN = 784  # of an image, about: hosted models and Qwen2-VL have similar numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A request for one completion of one episode, with the whole prompt.

    Each kind of engine has its own subclass. Nothing that an engine remembers of earlier requests
    changes its reply; `episode` only helps an engine to find what it has cached.
    """

    episode: int  # the same in all requests of an episode, until `end_episode`
    turn: int  # number of completions of the episode before this one
    max_tokens: int
    temperature: float  # 0: greedy
    seed: int  # of the episode; its token k depends only on (seed, k) and the logits


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest(GenerationRequest):
    """A request to an engine that takes token ids."""

    prompt_ids: Sequence[int]  # the whole prompt
    # For an exact engine: how many requests the episode makes at once, this one included.
    num_concurrent: int = 1
    # Completion tokens that the episode has already sampled with `seed`: token k of this completion
    # is token num_sampled + k of the seed.
    num_sampled: int = 0
    group_seed: int | None = None  # the same for all members of a group; None: there is no group
    member: int = 0  # number of the episode in its group
    images: Images = field(default_factory=dict)  # at least those in prompt_ids
    weights: str = ""  # empty: the policy's; else the name of a frozen policy of the engine
    # Only the local engine uses top_p below 1 and top_k above 0, in evaluation, never in training.
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRequest(GenerationRequest):
    """A request to an engine that takes messages."""

    messages: Sequence[Message]  # all; earlier replies as `TextReply.assistant_message`
    tools: Sequence[Tool] = ()  # the same in all requests of an episode


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedRequest(GenerationRequest):
    """A program's request to a hosted model."""

    messages: Sequence[Mapping[str, Any]]  # as the program has sent them
    tools: Sequence[Tool] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationRequest(GenerationRequest):
    """A request to a scripted policy, which reads what the environment has returned so far."""

    observations: Sequence[Observation]
    opening: Opening


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A sampled completion."""

    token_ids: list[int]  # the end token included if it was sampled
    logprobs: list[float]  # of token_ids, at the temperature
    finish: Finish
    policy_versions: list[int]  # those that sampled it, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReply:
    """A reply whose token ids are not known. Nothing can be trained on it.

    A number of tokens is None if the engine does not know it, and is then estimated.
    """

    text: str
    message: Mapping[str, Any] = field(default_factory=dict)  # see `assistant_message`
    finish: Finish = Finish.STOP
    num_prompt_tokens: int | None = None  # of the whole conversation before the reply
    num_completion_tokens: int | None = None

    @property
    def assistant_message(self) -> dict[str, Any]:
        """The reply as a message of later requests.

        Its content is the text, unless the endpoint's own `content` and `tool_calls` are in
        `message`.
        """
        return {"role": "assistant", **(self.message or {"content": self.text})}


class RelayingEngine(Protocol):
    """What an engine of hosted models has besides `Engine`, for programs that call its model."""

    async def relay(self, request: RelayedRequest) -> TextReply:
        """Answer the program's messages, which are sent as they are. The reply has a `message`.

        Raises:
            RequestRejectedError: the endpoint rejects the request.
            EngineError: there is no answer.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """The argument from which an engine of `type: python` is made."""

    config: RunConfig
    policy: "Policy | None"  # what is trained; None if the capabilities have takes="messages"
    executor: Executor  # of one thread, the only one that may touch the policy
    logs: Path  # the folder for log files


class Engine(Protocol):
    """Serves the episodes of one rollout batch at a time; of several, if it publishes in flight.

    The order of calls is `begin_rollouts`, then `generate` any number of times per episode, then
    `end_episode` once per episode. An episode may have several requests at a time.

    An engine of your own (`engine: {type: python, ...}`) is made by target(setup, **options), where
    `setup` is an `EngineSetup` and `target` a class that declares `capabilities`. If it is an
    asynchronous context manager as well, it is entered before its first episode and exited after
    its last.
    """

    capabilities: EngineCapabilities
    max_episodes: int  # how many episodes it serves at once

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        """Prepare for `num_episodes` episodes, of which at most `limit` play at once.

        Returns the number of the first episode; the others follow.
        """

    async def generate(self, request: Any) -> Any:
        """Reply to a prompt; see this module for the types.

        Raises EngineError: there is no answer.
        """

    def end_episode(self, episode: int) -> None:
        """Free what is cached of an episode, which has no further requests."""

    async def begin_update(self, *, idle: bool) -> None:
        """Prepare for an update of the policy, which lasts until the next `publish`.

        idle: True if nothing is sampled meanwhile, so the learner may use the engine's memory.
        """

    async def publish(self, version: int) -> None:
        """Use the current policy, as version `version`, for later completions.

        Raises:
            EngineError: the engine cannot be reached.
            TrainingError: the engine's policy differs from the learner's afterwards.
        """

    async def metrics(self) -> Mapping[str, float]:
        """Return measurements since the last call, by the names of metrics."""

    def facts(self) -> Mapping[str, JsonValue]:
        """Return facts about the engine for the run's record."""


class StaticEngine:
    """The methods of an `Engine` with nothing to update, to keep or to measure; to be inherited."""

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        return 0

    def end_episode(self, episode: int) -> None:
        """Do nothing."""

    async def begin_update(self, *, idle: bool) -> None:
        """Do nothing."""

    async def publish(self, version: int) -> None:
        """Do nothing."""

    async def metrics(self) -> Mapping[str, float]:
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        return {}


def turn_seed(episode_seed: int, turn: int) -> int:
    """Return a seed below 2**63 for one completion, for servers that draw random numbers."""
    digest = hashlib.sha256(f"{episode_seed}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def cut_text(text: str, max_tokens: int) -> str:
    """Return the text; of one with more than about `max_tokens`, the beginning and the end.

    Tokens are estimated as in `estimate_tokens`; a note says how many characters were left out.
    """
    max_length = BYTES_PER_TOKEN * max_tokens
    if len(text) <= max_length:
        return text
    num_last = max_length // 2
    first, last = text[: max_length - num_last], text[len(text) - num_last :]
    return f"{first}\n[{len(text) - max_length} characters left out]\n{last}"


def estimate_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Estimate the tokens of messages or tools as a quarter of the bytes of their JSON.

    A token of English text has about four bytes. Images count by their pixels.
    """
    found = [_images_of(each) for each in messages]
    texts = [
        {k: v for k, v in each.items() if k != "images"} if images else each
        for each, images in zip(messages, found, strict=True)
    ]
    text = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
    num_pixels = sum(each["width"] * each["height"] for images in found for each in images)
    num_bytes = len(text.encode(errors="replace"))
    return -(-num_bytes // BYTES_PER_TOKEN) + -(-num_pixels // PIXELS_PER_TOKEN)


def _images_of(message: Mapping[str, Any]) -> list[Image]:
    """Return a message's images, and nothing that a program has sent under that name."""
    images = message.get("images")
    found = list(images.values()) if isinstance(images, Mapping) else []
    return found if all(isinstance(each, Image) for each in found) else []
