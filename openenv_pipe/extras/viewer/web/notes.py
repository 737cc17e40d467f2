"""Notes on episodes and names of views, in a file beside the run folders, and never in one.

    runs/viewer_notes.json      of all runs below runs/

A note belongs to an episode's place in its run: source, step and line. The run's time of creation
is kept with its notes, so that a later run with that number does not get them. Only a viewer that
this machine alone reaches, with its token, writes the file.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.viewer.web.answers import Answer, acting, key_of
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.system.file_lock import locked
from openenv_pipe.system.files import read_json, write_json

FILE = "viewer_notes.json"
EPISODE = re.compile(r"[\w./@+-]{1,200} (\d{1,9})? \d{1,9}")  # source, step and line
ADDRESS = re.compile(r"#/[^\s<>\"]{1,2000}")  # of a page, with its filters
MAX_NAME_LENGTH = 80
MAX_NOTE_LENGTH = 10_000
MAX_VIEWS = 200
MAX_NOTES = 2000  # of a run

Content = dict[str, dict[str, Any]]


class Notes:
    """The file of one folder of runs. Its methods may be called from any thread."""

    def __init__(self, store: RunStore, *, can_write: bool) -> None:
        self.can_write = can_write
        self._store = store
        self._path = store.runs_dir / FILE
        self._lock = Lock()

    def views(self) -> dict[str, str]:
        """Return the addresses of views by name. Raises RunFolderError if the file is damaged."""
        return self._read()["views"]

    def of_run(self, key: str) -> dict[str, str]:
        found = self._read()["runs"].get(key, {})
        return found["episodes"] if found.get("created") == self._created(key) else {}

    def set_view(self, name: Any, address: Any) -> None:
        """Name a page; an empty address forgets the name. Raises ConfigError, RunFolderError."""
        if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME_LENGTH:
            raise ConfigError(f"the view's name has to have 1 to {MAX_NAME_LENGTH} characters")
        if address != "" and not (isinstance(address, str) and ADDRESS.fullmatch(address)):
            raise ConfigError(f"{address!r:.80} is not the address of a page, such as #/runs?q=x")

        def change(content: Content) -> None:
            _put(content["views"], name.strip(), address, MAX_VIEWS, "views")

        self._change(change)

    def set_note(self, key: str, episode: Any, text: Any) -> None:
        """Write the note on an episode; an empty text deletes it.

        Raises ConfigError, and RunFolderError.
        """
        if not isinstance(episode, str) or not EPISODE.fullmatch(episode):
            raise ConfigError(f"episode is {episode!r:.80}; expected source, step and line")
        if not isinstance(text, str) or len(text) > MAX_NOTE_LENGTH:
            raise ConfigError(f"a note is a text of at most {MAX_NOTE_LENGTH:,} characters")
        created = self._created(key)

        def change(content: Content) -> None:
            known = content["runs"].get(key, {})
            notes = known["episodes"] if known.get("created") == created else {}
            _put(notes, episode, text.strip(), MAX_NOTES, "notes of a run")
            content["runs"][key] = {"created": created, "episodes": notes}

        self._change(change)

    def _created(self, key: str) -> str:
        return self._store.folder(key).record.created.isoformat()

    def _read(self) -> Content:
        found = read_json(self._path) if self._path.exists() else {}
        if not isinstance(found, dict):
            raise RunFolderError(f"{self._path} holds no notes: {found!r:.80}; move it away")
        views, runs = _texts(found.get("views")), found.get("runs")
        of_runs = {
            key: {"created": each.get("created"), "episodes": _texts(each.get("episodes"))}
            for key, each in (runs if isinstance(runs, dict) else {}).items()
            if isinstance(each, dict)
        }
        return {
            "views": {name: to for name, to in views.items() if ADDRESS.fullmatch(to)},
            "runs": of_runs,
        }

    def _change(self, change: Callable[[Content], None]) -> None:
        if not self.can_write:
            raise ConfigError(
                "this viewer writes no notes, because others may reach it; start it without "
                "--host and without --no-token"
            )
        with self._lock, locked(self._path.parent):
            content = self._read()
            change(content)
            try:
                write_json(self._path, content)
            except OSError as error:
                raise RunFolderError(f"cannot write {self._path}: {error}") from error


def _texts(value: Any) -> dict[str, str]:
    found = value if isinstance(value, dict) else {}
    return {key: text for key, text in found.items() if isinstance(text, str)}


def _put(texts: dict[str, str], key: str, text: str, most: int, what: str) -> None:
    """Set or, with an empty text, delete an entry. Raises ConfigError if there are too many."""
    texts.pop(key, None)
    if text:
        texts[key] = text
    if len(texts) > most:
        raise ConfigError(f"there are {most:,} {what}, which is the most; delete some")


def notes_routes(notes: Notes) -> list[Route]:
    def read(request: Request) -> Response:
        key = key_of(request)
        found = {"notes": notes.of_run(key)} if key else {"views": notes.views()}
        return Answer({**found, "can_write": notes.can_write})

    async def write_note(request: Request, sent: Mapping[str, Any]) -> Any:
        key = key_of(request)
        await asyncio.to_thread(notes.set_note, key, sent.get("episode"), sent.get("text"))
        return {"notes": await asyncio.to_thread(notes.of_run, key)}

    async def write_view(_: Request, sent: Mapping[str, Any]) -> Any:
        await asyncio.to_thread(notes.set_view, sent.get("name"), sent.get("address"))
        return {"views": await asyncio.to_thread(notes.views)}

    run = "/api/runs/{name}/{number}/notes"
    return [
        Route("/api/views", read),
        Route("/api/views", acting(write_view), methods=["POST"]),
        Route(run, read),
        Route(run, acting(write_note), methods=["POST"]),
    ]
