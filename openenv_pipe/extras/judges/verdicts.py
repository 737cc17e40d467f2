"""Answers of judges and verifiers on disk, so that each is asked for once, also by a resumed run.

There is one file for each request. Its name is the digest of the endpoint's address and of the
request, which has the judge's model, the prompt and the episodes. The file has the endpoint's whole
answer, or why there was none.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.rewards.values import scored_group
from openenv_pipe.runs.paid_answers import FAILED, paid_answers
from openenv_pipe.system.response_cache import ResponseCache

KEY = "the folder of verdicts"  # for error messages


@dataclass(frozen=True, slots=True)
class _Failure:
    url: str
    body: Mapping[str, Any]
    answer: dict[str, Any]
    groups: set[str]  # that asked


class Verdicts:
    """The answers in a folder, and in folders of other runs that are only read."""

    def __init__(self, folder: Path, others: tuple[Path, ...] = ()) -> None:
        self._folder = folder
        self._own = ResponseCache(folder, KEY)
        self._others = [ResponseCache(other, KEY) for other in others if other.is_dir()]
        self._locks: dict[str, asyncio.Lock] = {}  # by request
        # What `settle` decides on, each with the groups that asked: failures by request, which are
        # not on disk; and the requests whose answers, which are on disk, nobody could read.
        self._failures: dict[str, _Failure] = {}
        self._unread: list[tuple[str, str, Mapping[str, Any]]] = []

    async def answer(
        self, url: str, body: Mapping[str, Any], ask: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Return the answer to a request, and ask only if there is none yet.

        Equal requests are asked once, also those made at the same time. An answer with the key
        FAILED is not on disk before `settle`.
        """
        request = json.dumps([url, body], sort_keys=True)
        async with self._locks.setdefault(request, asyncio.Lock()):
            answer = self._read(url, body)
            if answer is None and (known := self._failures.get(request)):
                known.groups.add(scored_group())
                answer = known.answer
            if answer is None:
                answer = await ask()
                if FAILED in answer:
                    self._failures[request] = _Failure(url, body, answer, {scored_group()})
                else:
                    # In a thread, because answers come in bursts and a disk takes its time to sync
                    # each; shielded, because an answer that was paid for is kept.
                    await asyncio.shield(asyncio.to_thread(self._own.write, url, body, answer))
        self._locks.pop(request, None)
        return answer

    def reject(self, url: str, body: Mapping[str, Any]) -> None:
        """Count an answer as a failure, because its reader rejects it."""
        self._unread.append((scored_group(), url, body))

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        """Decide on the failures of these groups; others may still be asking.

        goes_on: they were few enough for the run to go on. They are kept, so that a resumed run
            has the same ones. Otherwise a resumed run asks again; answers that nobody could read
            stay paid for.
        """
        settled = {
            request: each
            for request, each in self._failures.items()
            if not each.groups.isdisjoint(groups)
        }
        for request, failure in settled.items():
            del self._failures[request]
            if goes_on:
                self._own.write(failure.url, failure.body, failure.answer)
        for group, url, body in self._unread:
            if group in groups and not goes_on:
                self._own.set_aside(url, body)
        self._unread = [each for each in self._unread if each[0] not in groups]

    def _read(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        for cache in (self._own, *self._others):
            if (known := cache.read(url, body)) is not None:
                return known
        return None

    def answers(self) -> Iterator[dict[str, Any]]:
        """Iterate over the answers that this folder's run has paid for."""
        return paid_answers(self._folder)
