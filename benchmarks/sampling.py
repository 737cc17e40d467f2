"""Compare the tokens per second of the local engine's two forward passes, and of vLLM's server.

The model is `tiny` with random weights. All sides sample the same conversations, of several turns
with random prompts, in alternation: the model's own modules in one batch with several threads of
torch, as other models are sampled, and the fast pass in batches, with as many threads of one core
each. There is no environment, so the figures are those of the engine alone.

Where vLLM for CPUs is installed, a bare loop of requests to its server takes turns with them, in
float32. The loop sends token ids and the server keeps the conversations' prefixes.

    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=. python benchmarks/sampling.py \\
        [--conversations 64 256] [--rounds 7]
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import aiohttp
import torch
import transformers
from vllm_rollout import served

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import TokenRequest
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.vllm.install import find_build, find_installed
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.models.load import load_policy
from openenv_pipe.system.process import usable_cores

NUM_TURNS = 6
NUM_PROMPT_TOKENS = 8  # of a turn, as in conf=wordle with model=tiny
NUM_REPLY_TOKENS = 6
OWN, FAST, VLLM = "own modules", "fast pass", "vLLM's server"
Speeds = tuple[float, float | None]  # tokens per second, and per second of processor time
NO_END = -1  # no token ends a reply, so that all have the same length


def build_engine(
    side: str, precision: str, num_conversations: int, num_threads: int
) -> LocalEngine:
    config = compose(["conf=wordle", f"model.autocast={precision}"]).config
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    policy.end_ids = {NO_END}
    if side == OWN:
        policy.sampler = Sampler.RAGGED
    prepare = partial(prepare_thread, num_threads if side == OWN else 1)
    executor = ThreadPoolExecutor(1 if side == OWN else num_threads, "sampler", prepare)
    return LocalEngine(
        policy, max_episodes=num_conversations, executor=executor, in_batches=side == FAST
    )


def prompts(round_number: int, episode: int) -> list[list[int]]:
    """Return the new token ids of each turn of a conversation."""
    draw = random.Random(f"{round_number}/{episode}")
    return [[draw.randrange(5, 250) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_TURNS)]


async def play(engine: LocalEngine, round_number: int) -> int:
    """Play all conversations and return the number of sampled tokens."""
    engine.begin_rollouts(engine.max_episodes, engine.max_episodes)

    async def converse(episode: int) -> int:
        ids: list[int] = []
        for turn, new_ids in enumerate(prompts(round_number, episode)):
            request = TokenRequest(
                episode=episode,
                turn=turn,
                prompt_ids=[*ids, *new_ids],
                max_tokens=NUM_REPLY_TOKENS,
                temperature=1.0,
                seed=episode,
                num_sampled=turn * NUM_REPLY_TOKENS,
            )
            ids = [*request.prompt_ids, *(await engine.generate(request)).token_ids]
        engine.end_episode(episode)
        return len(ids) - NUM_TURNS * NUM_PROMPT_TOKENS

    return sum(await asyncio.gather(*map(converse, range(engine.max_episodes))))


async def ask(url: str, num_conversations: int, round_number: int) -> int:
    """Play the conversations on a vLLM server and return the number of sampled tokens."""
    sampling = {
        "temperature": 1.0,
        "max_tokens": NUM_REPLY_TOKENS,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
    }

    async def converse(episode: int) -> int:
        ids: list[int] = []
        for new_ids in prompts(round_number, episode):
            ids += new_ids
            body = {"token_ids": ids, "sampling_params": sampling | {"seed": episode}}
            async with http.post(f"{url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                ids += json.loads(await response.read())["choices"][0]["token_ids"]
        return len(ids) - NUM_TURNS * NUM_PROMPT_TOKENS

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        return sum(await asyncio.gather(*map(converse, range(num_conversations))))


def server_speeds(url: str, num_conversations: int, round_number: int) -> Speeds:
    """Return tokens per second; the server is another process, so its work is not measured."""
    started_s = time.perf_counter()
    num_tokens = asyncio.run(ask(url, num_conversations, round_number))
    return num_tokens / (time.perf_counter() - started_s), None


def engine_speeds(engine: LocalEngine, round_number: int) -> Speeds:
    """Return tokens per second, and per second of processor time of all threads."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    num_tokens = asyncio.run(play(engine, round_number))
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    return num_tokens / wall_s, num_tokens / processor_s


def compare(
    url: str | None, precision: str, num_conversations: int, arguments: argparse.Namespace
) -> dict[str, Speeds]:
    """Play the rounds of all sides in turn, and return each side's medians."""
    sides: dict[str, Callable[[int], Speeds]] = {}
    for side in (OWN, FAST):
        engine = build_engine(side, precision, num_conversations, arguments.threads)
        sides[side] = partial(engine_speeds, engine)
    if url and precision == "float32":
        sides[VLLM] = partial(server_speeds, url, num_conversations)
    found: dict[str, list[Speeds]] = {side: [] for side in sides}
    for round_number in range(arguments.rounds + 1):  # the first one warms up
        for side, speeds in sides.items():
            found[side].append(speeds(round_number))
    return {side: medians(values[1:]) for side, values in found.items()}


def medians(values: list[Speeds]) -> Speeds:
    wall, processor = zip(*values, strict=True)
    return statistics.median(wall), None if None in processor else statistics.median(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=len(usable_cores()))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    installed = find_installed(find_build())
    with ExitStack() as stack:
        url = stack.enter_context(served([])) if installed else None
        vllm = f", vllm {installed.version}" if installed else ""
        print(
            f"{datetime.date.today()}, {arguments.threads} threads ({platform.machine()}), load "
            f"{os.getloadavg()[0]:.1f}, python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}{vllm}; medians of "
            f"{arguments.rounds}\n"
        )
        print("| conversations | autocast | side | tokens/s | tokens/s of processor time |")
        print("|---|---|---|---|---|")
        for num_conversations in arguments.conversations:
            for precision in arguments.precisions:
                found = compare(url, precision, num_conversations, arguments)
                for side, (wall, processor) in found.items():
                    print(
                        f"| {num_conversations} | {precision} | {side} | {wall:,.0f} | "
                        f"{'' if processor is None else format(processor, ',.0f')} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
