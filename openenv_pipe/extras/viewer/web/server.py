"""The server of the viewer: its addresses, and the loop that tells pages of changes.

Every answer below /api/ is JSON. Handlers are plain functions, which starlette runs in threads, so
that reading files does not block the event loop.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.viewer.web import comparisons, episodes, run_page
from openenv_pipe.extras.viewer.web.access import Access
from openenv_pipe.extras.viewer.web.answers import Answer, error_answer, key_of, stream_changes
from openenv_pipe.extras.viewer.web.notes import Notes, notes_routes
from openenv_pipe.extras.viewer.web.play import play_routes
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.scoring import TokenScorer, scoring_routes
from openenv_pipe.extras.viewer.web.summaries import summarise_runs
from openenv_pipe.system.http_server import BoundedServer

if TYPE_CHECKING:
    from openenv_pipe.extras.viewer.play_checkpoint import CheckpointPlay

STATIC = Path(__file__).parent / "static"
POLL_S = 1.0  # how often a run's files are looked at while a page shows it
NUM_PORTS = 20  # that are tried if the first is taken
END_WAIT_S = 5  # for answers that are not complete when the server ends

Reader = Callable[[RunStore, str, Mapping[str, str]], Any]


def build_app(
    store: RunStore,
    *,
    token: str | None = None,
    is_local: bool = True,
    trust: bool = False,
    play: "CheckpointPlay | None" = None,
    scorer: TokenScorer | None = None,
) -> Starlette:
    """Return the application that shows the runs of a store.

    token: what a browser has to know; None: whoever reaches the server may ask.
    is_local: whether only this machine reaches the server, by one of its loopback names.
    trust: whether tokenizers of models that an untrusted run names may be read.
    play: plays checkpoints when a page asks for it, and ends with the application.
    scorer: scores tokens by checkpoints, likewise.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for each in (play, scorer):
            if each:
                await each.end()

    routes = _routes(store, trust=trust)
    routes += play_routes(store, play) if play else []
    routes += scoring_routes(store, scorer, trust=trust) if scorer else []
    routes += notes_routes(Notes(store, can_write=is_local and token is not None))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Access, token=token, is_local=is_local)],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((PipeError, OSError), error_answer),
    )
    app.state.has_ended = asyncio.Event()
    return app


def _routes(store: RunStore, *, trust: bool) -> list[BaseRoute]:
    def route(path: str, read: Reader) -> Route:
        def endpoint(request: Request) -> Response:
            return Answer(read(store, key_of(request), request.query_params))

        return Route(f"/api{path}", endpoint)

    def events(request: Request) -> Response:
        stamp = partial(asyncio.to_thread, _stamp, store, key_of(request))
        return stream_changes(request, stamp, poll_s=POLL_S)

    def image(request: Request) -> Response:
        png = episodes.read_image(store, key_of(request), request.query_params)
        return Response(png, media_type="image/png")

    def export(request: Request) -> Response:
        key = key_of(request)
        lines = episodes.export_lines(store, key, request.query_params)
        beginning = list(islice(lines, 1))  # so that an error becomes an answer
        name = f'attachment; filename="{key.replace("/", "_")}.jsonl"'
        return StreamingResponse(
            chain(beginning, lines),
            media_type="application/x-ndjson",
            headers={"Content-Disposition": name},
        )

    run = "/runs/{name}/{number}"
    return [
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=STATIC)),
        route("/runs", lambda store, _, __: {"runs": summarise_runs(store)}),
        route("/compare", lambda store, _, query: comparisons.compare_runs(store, query)),
        route("/evaluations", lambda store, _, query: comparisons.show_evaluations(store, query)),
        route("/sweeps", lambda store, _, __: {"sweeps": comparisons.list_sweeps(store)}),
        route("/sweeps/{stamp}", lambda store, stamp, _: comparisons.show_sweep(store, stamp)),
        route(run, lambda store, key, _: run_page.describe_run(store, key)),
        route(f"{run}/progress", lambda store, key, _: run_page.describe_progress(store, key)),
        route(f"{run}/curves", _curves),
        route(f"{run}/log", _log),
        route(f"{run}/episodes", episodes.list_episodes),
        route(f"{run}/tasks", episodes.list_tasks),
        route(f"{run}/episode", episodes.show_episode),
        route(f"{run}/group", episodes.show_group),
        route(
            f"{run}/tokens",
            lambda store, key, query: episodes.show_tokens(store, key, query, trust=trust),
        ),
        Route(f"/api{run}/export", export),
        Route(f"/api{run}/image", image),
        Route(f"/api{run}/events", events),
    ]


def open_socket(host: str, port: int, *, is_fixed: bool) -> socket.socket:
    """Listen on a port, or on one of the next if it is taken and the user has not chosen it.

    Raises ConfigError: the port cannot be used.
    """
    problem: OSError | None = None
    for number in range(port, port + (1 if is_fixed else NUM_PORTS)):
        try:
            return socket.create_server(
                (host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            problem = error
    raise ConfigError(
        f"--host {host} --port {port} cannot be used: {problem}; choose another --port"
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    _Server(app).run(sockets=[listener])


class _Server(BoundedServer):
    """Ends the streams of events, and checks twice a second, not ten times, whether to end."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(app, log_level="warning", timeout_graceful_shutdown=END_WAIT_S)
        self._has_ended: asyncio.Event = app.state.has_ended

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._has_ended.set()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        counter = 0  # tenths of seconds, by which `on_tick` renews the date of answers
        while not await self.on_tick(counter):
            counter = (counter + 5) % 864_000
            await asyncio.sleep(0.5)


def _curves(store: RunStore, key: str, query: Mapping[str, str]) -> Any:
    epoch, after = (query.get(name, "0") for name in ("epoch", "after"))
    known = [int(each) if each.isascii() and each.isdecimal() else 0 for each in (epoch, after)]
    return run_page.curves(store, key, epoch=known[0], after=known[1])


def _log(store: RunStore, key: str, query: Mapping[str, str]) -> Any:
    return {"text": run_page.tail(store.path(key), query.get("name", ""))}


def _stamp(store: RunStore, key: str) -> list[Any]:
    """Return what differs after a step, an evaluation or a change of status."""
    found: list[Any] = []
    try:
        folder = store.folder(key)
        found.append(folder.status)
        for name in ("metrics.jsonl", "run.json", "eval"):
            file = folder.path / name
            found.append(file.stat().st_mtime_ns if file.exists() else 0)
    except (PipeError, OSError) as error:
        found.append(str(error)[:200].encode(errors="replace").decode())
    return found
