"""One request for the first completions of a group's members, whose prompts are usually equal.

vLLM samples completion i of a request with the request's seed plus i. Member m therefore has the
seed of its group plus m, and gets the same completion whichever members share its request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openenv_pipe.engines.vllm.answers import Sampled
from openenv_pipe.types import Images

LINGER_S = 0.003  # wait for further members after each one; all ask at about the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRequest:
    """The prompt, the server and the sampling parameters of a request, without its seed."""

    server: int  # its number
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    images: Images = field(default_factory=dict)  # those whose token ids are in the prompt

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for members that can share a request."""
        return self.server, self.prompt, tuple(map(str, self.sampling.items()))


@dataclass(kw_only=True, slots=True)
class _Waiting:
    request: SharedRequest
    members: dict[int, asyncio.Future[Sampled]]
    timer: asyncio.TimerHandle | None = None


class GroupRequests:
    """Collects the requests of a group's members for a moment, and sends them as one."""

    def __init__(self, ask: Callable[[SharedRequest, int, int], Awaitable[list[Sampled]]]) -> None:
        """ask: sends a request with a first seed, for a number of completions."""
        self._ask = ask
        self._waiting: dict[tuple[Any, ...], _Waiting] = {}
        self._requests: set[asyncio.Task[None]] = set()

    async def sample(self, request: SharedRequest, group_seed: int, member: int) -> Sampled:
        """Return one member's completion. Cancelling one member does not cancel the others.

        Raises ServerGoneError, EngineError: as `ask` does.
        """
        key = (group_seed, *request.key)
        waiting = self._waiting.setdefault(key, _Waiting(request=request, members={}))
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        waiting.members[member] = future
        if waiting.timer is not None:
            waiting.timer.cancel()
        waiting.timer = asyncio.get_running_loop().call_later(LINGER_S, self._send, key, group_seed)
        return await future

    def _send(self, key: tuple[Any, ...], group_seed: int) -> None:
        waiting = self._waiting.pop(key)
        wanted = {member: future for member, future in waiting.members.items() if not future.done()}
        for run in consecutive(sorted(wanted)):
            futures = [wanted[member] for member in run]
            task = asyncio.create_task(self._request(waiting.request, group_seed + run[0], futures))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            for future in futures:
                future.add_done_callback(partial(_cancel_unwanted, task, futures))

    async def _request(
        self, request: SharedRequest, seed: int, futures: Sequence[asyncio.Future[Sampled]]
    ) -> None:
        try:
            answers = await self._ask(request, seed, len(futures))
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, answer in zip(futures, answers, strict=True):
            if not future.done():
                future.set_result(answer)


def _cancel_unwanted(
    task: asyncio.Task[None], futures: Sequence[asyncio.Future[Sampled]], _: object
) -> None:
    """Cancel the task of a request when all of its members are cancelled."""
    if all(future.cancelled() for future in futures):
        task.cancel()


def consecutive(numbers: Sequence[int]) -> list[list[int]]:
    """Split sorted numbers into runs without gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
