"""A scripted verifier behind an HTTP endpoint, for the tests of rewards that it decides."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any, Mapping[str, str]]  # status, body, headers


def right_replies(episode: dict[str, Any]) -> float:
    """Return the share of replies that are the letter b."""
    replies = [turn["reply"] for turn in episode["turns"]]
    return sum(reply == "b" for reply in replies) / max(1, len(replies))


class VerifierServer:
    """The server, in threads of its own while it is entered."""

    def __init__(self, verdict: Callable[[dict[str, Any]], Any] = right_replies) -> None:
        """verdict: the answer about an episode."""
        self.verdict = verdict
        self.bodies: list[dict[str, Any]] = []  # of each request
        self.headers: list[dict[str, str]] = []
        self.faults: list[Answer | None] = []  # used up one for each request; None: it hangs
        self._has_ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/verify"

    def __enter__(self) -> "VerifierServer":
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner._answer(self)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.faults.pop(0) if self.faults else (200, self.verdict(body), {})
        if answer is None:
            self._has_ended.wait(600)
            return
        status, content, headers = answer
        data = content
        if not isinstance(data, bytes):
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)
