"""Play a checkpoint in its environment: what the pages send, and what they are shown of a session.

The viewer has one session at a time, a `CheckpointPlay`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openenv_pipe.environments.images import find_references, reference_of
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.viewer.web.answers import Answer, acting, stream_changes
from openenv_pipe.extras.viewer.web.episodes import content_of
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.episodes import RecordedEpisode
from openenv_pipe.types import Episode, Image, Message

if TYPE_CHECKING:
    from openenv_pipe.extras.viewer.play_checkpoint import CheckpointPlay

MAX_INDEX = 10**9
POLL_S = 0.2  # between two checks of a page's connection whether the session has changed


class PlayStatus(StrEnum):
    STARTING = "starting"  # of the servers and the model
    CHOOSING = "choosing"  # by the person: who replies, and with what
    WORKING = "working"  # by the model, or the environment
    OVER = "over"  # the episode has ended, and the person can begin another one
    ENDED = "ended"  # the servers and the model are gone


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayRequest:
    run: str  # the key of the run
    checkpoint: str  # its step, `best` or `start`; empty: the newest
    split: Literal["train", "eval"]
    index: int  # of the task


@dataclass(kw_only=True, slots=True)
class PlayState:
    request: PlayRequest
    status: PlayStatus = PlayStatus.STARTING
    note: str = ""  # what is done now, or why the session or the episode has ended
    model: str = ""  # the run and the checkpoint that plays
    num_tasks: int | None = None  # of the split
    episode: Episode | None = None
    opening: Sequence[Message] = ()  # the first messages that the model gets
    max_turns: int | None = None
    authors: list[str] = field(default_factory=list)  # who gave the reply of each turn
    scripted: list[dict[str, str]] = field(default_factory=list)  # replies by player, for each turn


def play_routes(store: RunStore, session: "CheckpointPlay") -> list[Route]:
    async def state(_: Request) -> Response:
        return Answer(shown_state(session))

    async def start(_: Request, sent: Mapping[str, Any]) -> Any:
        wanted = _request_of(sent)
        store.path(wanted.run)
        await session.start(wanted)
        return shown_state(session)

    async def reply(_: Request, sent: Mapping[str, Any]) -> Any:
        text = sent.get("text")
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"text is {text!r:.80}; expected a string, or null")
        await session.reply(text)
        return shown_state(session)

    async def end(_: Request, __: Mapping[str, Any]) -> Any:
        await session.end()
        return shown_state(session)

    async def image(request: Request) -> Response:
        png = _image(session, request.query_params.get("name", ""))
        if png is None:
            return Answer({"error": "the session has no such image"}, status_code=404)
        return Response(png, media_type="image/png")

    async def version() -> int:
        return session.version

    def events(request: Request) -> Response:
        return stream_changes(request, version, poll_s=POLL_S)

    return [
        Route("/api/play", state),
        Route("/api/play/start", acting(start), methods=["POST"]),
        Route("/api/play/reply", acting(reply), methods=["POST"]),
        Route("/api/play/end", acting(end), methods=["POST"]),
        Route("/api/play/image", image),
        Route("/api/play/events", events),
    ]


def shown_state(session: "CheckpointPlay") -> dict[str, Any]:
    """Return what a page shows of the session; its status is null if there was none."""
    state = session.state
    if state is None:
        return {"status": None}
    episode = state.episode
    return {
        **asdict(state.request),
        "status": state.status,
        "note": state.note,
        "model": state.model,
        "num_tasks": state.num_tasks,
        "max_turns": state.max_turns,
        "opening": [{"role": each["role"], "content": each["content"]} for each in state.opening],
        "authors": state.authors,
        "scripted": state.scripted,
        "episode": episode and _shown_episode(episode),
    }


def _shown_episode(episode: Episode) -> dict[str, Any]:
    recorded = RecordedEpisode(line=0, group="play", episode=episode, advantages=None)
    content = content_of(recorded, "api/play/image?name={}".format, whole=False)
    # The engine counts versions of its own; the page names the checkpoint.
    turns = [{**turn, "policy_versions": []} for turn in content["turns"]]
    return {
        **content,
        "turns": turns,
        "reward": episode.reward if episode.is_scored else None,
        "success": episode.success,
        "status": episode.status,
    }


def _image(session: "CheckpointPlay", name: str) -> bytes | None:
    episode = session.state and session.state.episode
    for observation in episode.observations if episode else ():
        for each in find_references(observation):
            if isinstance(each, Image) and f"{reference_of(each)}.png" == name:
                return each.png
    return None


def _request_of(sent: Mapping[str, Any]) -> PlayRequest:
    run, checkpoint, split = (sent.get(name, "") for name in ("run", "checkpoint", "split"))
    index = sent.get("index", 0)
    is_checkpoint = isinstance(checkpoint, str) and (
        checkpoint in ("", "best", "start") or (checkpoint.isascii() and checkpoint.isdecimal())
    )
    if not is_checkpoint:
        raise ConfigError(f"checkpoint is {checkpoint!r:.80}; expected a step, best or start")
    if split not in ("train", "eval"):
        raise ConfigError(f"split is {split!r:.80}; expected train or eval")
    if type(index) is not int or not 0 <= index <= MAX_INDEX:
        raise ConfigError(f"index is {index!r:.80}; expected the number of a task")
    return PlayRequest(run=str(run), checkpoint=checkpoint, split=split, index=index)
