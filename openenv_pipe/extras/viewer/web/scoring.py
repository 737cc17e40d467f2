"""Score the tokens of an episode on demand, in a process of its own (`score_tokens.py`)."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.viewer.episodes.query import TRAIN
from openenv_pipe.extras.viewer.web.answers import acting, key_of
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.tokens import MAX_TOKENS, UNTRAINED, texts_of

COMMAND = (sys.executable, "-m", "openenv_pipe.extras.viewer.score_tokens")
LIMIT_S = 600


class TokenScorer:
    """Scores one episode at a time. All calls come from one event loop."""

    def __init__(self, *, trust: bool, limit_s: int = LIMIT_S) -> None:
        """trust: also load checkpoints of runs that another user made, or that were changed since.

        limit_s: the time for one episode, loading of the model included.
        """
        self._trust = trust
        self._limit_s = limit_s
        self._process: Process | None = None
        self._is_busy = False

    async def score(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_busy:
            raise ConfigError("the viewer is scoring another episode; try again when that is done")
        self._is_busy = True
        try:
            return await self._output_of({**wanted, "trust": self._trust, "limit_s": self._limit_s})
        finally:
            await self.end()
            self._is_busy = False

    async def _output_of(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        self._process = process
        assert process.stdin and process.stdout and process.stderr
        with suppress(ConnectionError):  # it has ended, and its errors say why
            process.stdin.write(json.dumps(wanted).encode() + b"\n")
            await process.stdin.drain()
        # Its stdin stays open: the program ends when this process, however it ends, closes it.
        output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
        await process.wait()
        process.stdin.close()
        if process.returncode == -signal.SIGALRM:
            raise ConfigError(
                f"the tokens were not scored within {self._limit_s} s; the model may be "
                "too large for this machine"
            )
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise ConfigError(f"the tokens could not be scored: {reason:.500}")
        found: dict[str, Any] = json.loads(output)
        if "error" in found:
            raise ConfigError(found["error"])
        return found

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def scoring_routes(store: RunStore, scorer: TokenScorer, *, trust: bool) -> list[Route]:
    async def score(request: Request, sent: Mapping[str, Any]) -> Any:
        path = store.path(key_of(request))
        found = await scorer.score({"path": str(path.resolve()), **_checked(sent)})
        ids = sorted({token for top in found["top"] if top for token, _ in top})
        texts, _ = await asyncio.to_thread(texts_of, ids, path, trust=trust)
        known = dict(zip(ids, texts or map(str, ids), strict=True))
        return found | {
            "scored": found["scored"][:MAX_TOKENS],
            "kl": found["kl"][:MAX_TOKENS],
            "top": [
                top and [[known[token], share] for token, share in top]
                for top in found["top"][:MAX_TOKENS]
            ],
        }

    return [Route("/api/runs/{name}/{number}/scores", acting(score), methods=["POST"])]


def _checked(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return which episode is to be scored, by which checkpoint. Raises RunFolderError."""
    source, checkpoint = sent.get("source") or TRAIN, sent.get("checkpoint")
    step, line = sent.get("step"), sent.get("line")
    is_checkpoint = isinstance(checkpoint, str) and (
        checkpoint == UNTRAINED or (checkpoint.isascii() and checkpoint.isdecimal())
    )
    if not is_checkpoint:
        raise RunFolderError(f"checkpoint is {checkpoint!r:.80}; expected a step, or {UNTRAINED}")
    if not isinstance(source, str) or type(line) is not int or type(step) not in (int, type(None)):
        raise RunFolderError(
            f"source, step and line are {source!r:.80}, {step!r:.20} and {line!r:.20}; expected "
            "a text, a number or null, and a number"
        )
    return {"source": source, "step": step, "line": line, "checkpoint": checkpoint}
