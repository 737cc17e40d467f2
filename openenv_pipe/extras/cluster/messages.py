"""What passes between a rollout worker and the process that has the engine."""

from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import EngineCapabilities
from openenv_pipe.errors import ConfigError, FailureError
from openenv_pipe.rollout.context import EpisodeSpec
from openenv_pipe.types import Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayOrder:
    play: int  # identifies this attempt at the episode in all later messages
    spec: EpisodeSpec
    capabilities: EngineCapabilities  # of the engine that replies


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyOrder:
    """The engine's answer to a `ReplyRequest`."""

    play: int
    reply: Any  # see `engines.base`; a SessionError ends the episode


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOrder:
    """The episode is not needed any more."""

    play: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRequest:
    """A request to the engine."""

    play: int
    request: Any  # see `engines.base`


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeEnd:
    play: int
    episode: Episode | None  # None: there is an error
    error: ConfigError | FailureError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What has happened in a worker."""

    num_deaths: int  # of environment servers, since the worker's start
    event: ReplyRequest | EpisodeEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What a worker reports when its environment servers run."""

    capacity: int  # episodes that it plays at once
    node: str  # the host name
    host: dict[str, JsonValue]  # see `Host.facts`


Order = PlayOrder | ReplyOrder | CancelOrder
