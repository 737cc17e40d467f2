"""The web server that programs reach: the model in four dialects, and their environment's session.

Every episode has a random key, which is both password and route. `/v1/...` and the paths of other
dialects take it from where their clients send it; the addresses of a session have it in their path
(`session_routes`).
"""

import contextlib
import hmac
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import Scope

from openenv_pipe.extras.agents.calls import MODEL, ModelCalls
from openenv_pipe.extras.agents.http.capture import Session as CaptureSession
from openenv_pipe.extras.agents.http.capture import Upstream, extract_api_key
from openenv_pipe.extras.agents.http.endpoint import Endpoint, admit_call, listen
from openenv_pipe.extras.agents.http.gate import (
    MAX_MESSAGE_BYTES,
    Admitted,
    RejectedError,
    reject_other_sites,
)
from openenv_pipe.extras.agents.session_routes import SessionRoutes
from openenv_pipe.extras.agents.steps import EnvironmentSteps
from openenv_pipe.system.http_server import QUEUE
from openenv_pipe.system.untrusted_text import for_people, visible

ADDRESS = "127.0.0.1"
ROLLOUTS = "/rollouts"  # where clients open episodes
UNKNOWN_KEY = "the key is missing or wrong, or its episode is over"


@dataclass(kw_only=True, slots=True)
class Rollout:
    """What the gateway knows of one episode: its key, its model calls and its session."""

    key: str
    calls: ModelCalls
    steps: EnvironmentSteps
    capture: CaptureSession = field(repr=False)

    @property
    def num_rejected_calls(self) -> int:
        """How many calls got the final message because the budget was used up."""
        return int(self.capture.budget_stop_count)

    @property
    def fatal_findings(self) -> list[str]:
        """What makes the recorded calls useless for training."""
        return [visible(text) for text in self.capture.findings if text.startswith("[FATAL")]


class Gateway(Endpoint):
    def __init__(
        self,
        host: str = ADDRESS,
        port: int = 0,
        routes: Sequence[BaseRoute] = (),
        *,
        token: str | None = None,
        level: str = "tokens",
        path: Path | None = None,
        url: str = "",
    ) -> None:
        """
        port: 0 for any free one.
        routes: further addresses.
        token: what clients have to send to open episodes; None: there are no clients.
        path: of a unix socket to listen at in place of host and port; everyone who can open its
            folder may use it. `url` is then how programs reach it.

        Raises OSError if it cannot listen there.
        """
        self._rollouts: dict[str, Rollout] = {}
        self._token = token
        self._host = host if path is None else None
        if path is None:
            listener = listen(host, port)
            name = f"[{host}]" if ":" in host else host
            self.url = f"http://{name}:{listener.getsockname()[1]}"
        else:
            listener, self.url = _listen_at(path), url
        super().__init__(
            listener,
            model=MODEL,
            find=self._calls,
            admit=self._admit,
            level=level,
            routes=[*routes, *SessionRoutes(lambda key: self._rollouts[key].steps).routes],
            on_rejection=self._note_rejection,
        )

    @contextlib.contextmanager
    def rollout(
        self, calls: ModelCalls, steps: EnvironmentSteps, *, max_calls: int
    ) -> Iterator[Rollout]:
        """Answer the program of one episode until the end of the block."""
        key = f"sk-{secrets.token_hex(16)}"
        capture = self._registry.create(
            key, upstream=Upstream(llm_url="", api_key=key), max_model_calls=max_calls
        )
        rollout = Rollout(key=key, calls=calls, steps=steps, capture=capture)
        self._rollouts[key] = rollout
        try:
            yield rollout
        finally:
            steps.has_ended.set()
            del self._rollouts[key]
            self._registry.delete(key)

    def _admit(self, scope: Scope, headers: Headers) -> Admitted:
        """Admit the token at the address that opens episodes, and elsewhere an episode's key."""
        reject_other_sites(headers, self._host)
        path: str = scope["path"]
        if path == ROLLOUTS and self._token is not None:
            given = headers.get("authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                text = "this server needs its token, as `Authorization: Bearer TOKEN`"
                raise RejectedError(401, text)
            return Admitted(client=self._token, max_bytes=MAX_MESSAGE_BYTES)
        room, _, rest = path.removeprefix("/").partition("/")
        has_key = room in ("openenv", "rollouts")  # in its path
        key = rest.partition("/")[0] if has_key else extract_api_key(headers)
        if key not in self._rollouts:
            raise RejectedError(404 if room == "rollouts" else 401, UNKNOWN_KEY)
        return (
            Admitted(client=key, max_bytes=MAX_MESSAGE_BYTES) if has_key else admit_call(scope, key)
        )

    def _note_rejection(self, key: str, reason: str) -> None:
        if (rollout := self._rollouts.get(key)) is not None:
            rollout.calls.rejections.append(for_people(reason))

    def _calls(self, key: str) -> ModelCalls | None:
        rollout = self._rollouts.get(key)
        return None if rollout is None else rollout.calls


def _listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(QUEUE)
    return listener
