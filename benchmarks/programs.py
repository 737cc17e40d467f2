"""Compare 64 programs that call the model with the same requests sent to the engine directly.

    PYTHONPATH=.:tests python benchmarks/programs.py    # prints a table

The programs are processes of Python's own HTTP client, started as in a training. Each holds a
conversation of several calls, of which the first waits until all programs run. The requests that
reach the engine are then sent to it again, without programs, HTTP, templates and text. Both sides
alternate, so that a busy machine slows both.

The engine `timed` answers after the time that a server on a GPU would take, and uses no processor.
"""

import argparse
import asyncio
import datetime
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.pipeline.engines import batch_threads
from openenv_pipe.system.process import usable_cores
from openenv_pipe.types import Finish
from tests.programs import agent_config, play_episodes, programs_context

PROGRAM = """
messages = [user("x" * {num_prompt_tokens})]
for _ in range({num_calls}):
    messages += [ask(messages, max_tokens={num_reply_tokens}), user("y" * 32)]
"""
LIMIT_S = 3600.0


class TimedEngine:
    """Answers each request after as long as a server takes that samples so many tokens a second."""

    capabilities = VllmEngineConfig.capabilities

    def __init__(self, chat: ChatFormat, num_programs: int, tokens_per_s: float) -> None:
        self.max_episodes = num_programs
        self._token = chat.reply_ids("a")[0]
        self._tokens_per_s = tokens_per_s

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        await asyncio.sleep(request.max_tokens / self._tokens_per_s)
        ids = [self._token] * request.max_tokens
        return Completion(
            token_ids=ids, logprobs=[-1.0] * len(ids), finish=Finish.LENGTH, policy_versions=[0]
        )

    def end_episode(self, episode: int) -> None:
        """There is nothing to drop."""


@dataclass
class Measured:
    """An engine whose first requests wait for each other; from then on the clock runs."""

    engine: Any
    requests: dict[int, list[TokenRequest]] = field(default_factory=lambda: defaultdict(list))
    num_tokens: int = 0
    _num_first: int = 0
    _all_are_here: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.capabilities = self.engine.capabilities
        self.max_episodes = self.engine.max_episodes
        self.begin_rollouts = self.engine.begin_rollouts
        self.end_episode = self.engine.end_episode

    async def generate(self, request: TokenRequest) -> Completion:
        self.requests[request.episode].append(request)
        if request.turn == 0:
            self._num_first += 1
            if self._num_first == self.max_episodes:
                self._all_are_here.set()
                self._begun = time.perf_counter(), time.process_time()
            await self._all_are_here.wait()
        completion = await self.engine.generate(request)
        self.num_tokens += len(completion.token_ids)
        self._ended = time.perf_counter(), time.process_time()
        return completion

    def speed(self) -> float:
        """Return tokens per second."""
        return self.num_tokens / (self._ended[0] - self._begun[0])

    def processor_s(self) -> float:
        """Return seconds of processor time of this process."""
        return self._ended[1] - self._begun[1]


async def by_programs(engine: Any, chat: ChatFormat, script: str, folder: Path) -> Measured:
    measured = Measured(engine)
    limits = {
        "model.max_length": 100_000,
        "env.max_episode_tokens": 100_000,
        "env.max_reply_tokens": 10_000,
    }
    context = programs_context(
        agent_config(script, timeout_s=LIMIT_S, max_calls=1000),
        folder,
        chat=chat,
        engine=measured,
        changes=limits,
    )
    async with context as rollout:
        episodes = await play_episodes(rollout, group_size=engine.max_episodes)
    assert not any(episode.failed for episode in episodes), episodes[0].error
    return measured


async def directly(engine: Any, requests: Sequence[Sequence[TokenRequest]]) -> Measured:
    measured = Measured(engine)
    engine.begin_rollouts(len(requests), len(requests))

    async def converse(own: Sequence[TokenRequest]) -> None:
        for request in own:
            await measured.generate(request)
        engine.end_episode(own[0].episode)

    await asyncio.gather(*map(converse, requests))
    return measured


@asynccontextmanager
async def local(num_programs: int, max_length: int) -> AsyncIterator[tuple[Any, ChatFormat]]:
    config = compose(["conf=wordle", f"model.max_length={max_length}"]).config
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    policy.end_ids = {-1}  # no token ends a reply, so that all have the same length
    executor = batch_threads(policy, len(usable_cores()))
    assert executor is not None and policy.is_small
    with executor:
        yield (
            LocalEngine(
                policy, max_episodes=num_programs, executor=executor, batch_executor=executor
            ),
            policy.chat,
        )


@asynccontextmanager
async def timed(num_programs: int, tokens_per_s: float) -> AsyncIterator[tuple[Any, ChatFormat]]:
    chat = ChatFormat(build_tokenizer())
    yield TimedEngine(chat, num_programs, tokens_per_s), chat


async def compared(opened: Any, script: str, num_rounds: int, folder: Path) -> str:
    """Return a row of the table."""
    async with opened as (engine, chat):
        sides: list[list[Measured]] = [[], []]
        for number in range(num_rounds + 1):  # the first one warms up
            first = await by_programs(engine, chat, script, folder / str(number))
            second = await directly(engine, list(first.requests.values()))
            assert first.num_tokens == second.num_tokens
            if number:
                sides[0].append(first)
                sides[1].append(second)
    speeds = [statistics.median(each.speed() for each in side) for side in sides]
    ratio = statistics.median(a.speed() / b.speed() for a, b in zip(*sides, strict=True))
    added_s = statistics.median(
        a.processor_s() - b.processor_s() for a, b in zip(*sides, strict=True)
    )
    num_calls = sum(map(len, sides[0][0].requests.values()))
    return (
        f"{speeds[1]:,.0f} | {speeds[0]:,.0f} | {ratio:.0%} | {1000 * added_s / num_calls:.1f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--reply-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens-per-s", type=float, nargs="+", default=[20.0, 50.0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(
        f"{datetime.date.today()}, {len(usable_cores())} cores, load {os.getloadavg()[0]:.1f}; "
        f"{given.programs} programs with {given.calls} calls of {given.reply_tokens} tokens; "
        f"medians of {given.rounds}\n"
    )
    print("| engine | first prompt | directly, tokens/s | by programs | of it | added per call |")
    print("|---|---|---|---|---|---|")
    for num_prompt_tokens in given.prompt_tokens:
        script = PROGRAM.format(
            num_prompt_tokens=num_prompt_tokens,
            num_calls=given.calls,
            num_reply_tokens=given.reply_tokens,
        )
        length = num_prompt_tokens + given.calls * (given.reply_tokens + 64) + 64
        sides = {
            f"timed, {speed:g} tokens/s each": timed(given.programs, speed)
            for speed in given.tokens_per_s
        }
        sides["local, 0.95 M parameters"] = local(given.programs, length)
        for name, opened in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                row = asyncio.run(compared(opened, script, given.rounds, Path(folder)))
            print(f"| {name} | {num_prompt_tokens} | {row}", flush=True)


if __name__ == "__main__":
    main()
