"""Compare the tokens per second of the local engine's two forward passes, and of vLLM's server.

All sides sample the same conversations in alternation, with random prompts, of which each group of
eight conversations shares the first: the model's own modules in one batch with several threads of
torch, and the fast pass, as `engine=local` divides and runs it, also with an adapter. There is no
environment, so the figures are those of the engine alone.

Where vLLM for CPUs is installed, a bare loop of requests to its server takes turns with them. The
loop sends token ids and the server keeps the conversations' prefixes.

    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=. python benchmarks/sampling.py \\
        [--model tiny] [--turns 6 --prompt-tokens 8 --reply-tokens 6] [--conversations 64 256] \\
        [--rounds 7] [--sides "fast pass" "vLLM's server"]
    ... --model smollm2_135m --turns 1 --prompt-tokens 64 --reply-tokens 48 --conversations 64
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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import aiohttp
import torch
import transformers
from vllm_rollout import served

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import TokenRequest
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.vllm.installed import find_build, find_installed
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.models.load import load_policy
from openenv_pipe.pipeline.engines import batch_threads
from openenv_pipe.system.http import bearer
from openenv_pipe.system.process import usable_cores

GROUP_SIZE = 8
OWN, FAST, LORA, VLLM = "own modules", "fast pass", "fast pass, LoRA 16", "vLLM's server"
SIDES = (OWN, FAST, LORA, VLLM)
Speeds = tuple[float, float | None]  # tokens per second, and per second of processor time
NO_END = -1  # no token ends a reply, so that all have the same length


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """What is sampled: conversations of several turns."""

    num_conversations: int
    num_turns: int
    num_prompt_tokens: int  # of a turn
    num_reply_tokens: int

    def prompts(self, round_number: int, episode: int) -> list[list[int]]:
        """Return the new token ids of each turn; the first turn's are those of the whole group."""
        draws = [random.Random(f"{round_number}/{episode // GROUP_SIZE}/group")]
        draws += [random.Random(f"{round_number}/{episode}")] * (self.num_turns - 1)
        return [[draw.randrange(5, 250) for _ in range(self.num_prompt_tokens)] for draw in draws]


def build_engine(side: str, model: str, precision: str, game: Game, num_cores: int) -> LocalEngine:
    rank = 16 if side == LORA else 0
    overrides = [f"model={model}", f"model.autocast={precision}", f"model.lora.rank={rank}"]
    config = compose(["conf=wordle", *overrides]).config
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    policy.end_ids = {NO_END}
    if side == OWN:
        policy.sampler = Sampler.RAGGED
    batch_executor = batch_threads(policy, num_cores)
    executor = batch_executor if policy.is_small else None
    return LocalEngine(
        policy,
        max_episodes=game.num_conversations,
        executor=executor or ThreadPoolExecutor(1, "samples", partial(prepare_thread, num_cores)),
        batch_executor=batch_executor,
    )


async def play(engine: LocalEngine, game: Game, round_number: int) -> int:
    """Play all conversations and return the number of sampled tokens."""
    engine.begin_rollouts(engine.max_episodes, engine.max_episodes)

    async def converse(episode: int) -> int:
        ids: list[int] = []
        for turn, new_ids in enumerate(game.prompts(round_number, episode)):
            request = TokenRequest(
                episode=episode,
                turn=turn,
                prompt_ids=[*ids, *new_ids],
                max_tokens=game.num_reply_tokens,
                temperature=1.0,
                seed=episode,
                num_sampled=turn * game.num_reply_tokens,
            )
            ids = [*request.prompt_ids, *(await engine.generate(request)).token_ids]
        engine.end_episode(episode)
        return len(ids) - game.num_turns * game.num_prompt_tokens

    return sum(await asyncio.gather(*map(converse, range(engine.max_episodes))))


async def ask(server: VllmProcess, game: Game, round_number: int) -> int:
    """Play the conversations on a vLLM server and return the number of sampled tokens."""
    sampling = {
        "temperature": 1.0,
        "max_tokens": game.num_reply_tokens,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
    }

    async def converse(episode: int) -> int:
        ids: list[int] = []
        for new_ids in game.prompts(round_number, episode):
            ids += new_ids
            body = {"token_ids": ids, "sampling_params": sampling | {"seed": episode}}
            async with http.post(f"{server.url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                ids += json.loads(await response.read())["choices"][0]["token_ids"]
        return len(ids) - game.num_turns * game.num_prompt_tokens

    connector, headers = aiohttp.TCPConnector(limit=0), bearer(server.key).headers
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        return sum(await asyncio.gather(*map(converse, range(game.num_conversations))))


def server_speeds(server: VllmProcess, game: Game, round_number: int) -> Speeds:
    """Return tokens per second; the server is another process, so its work is not measured."""
    started_s = time.perf_counter()
    num_tokens = asyncio.run(ask(server, game, round_number))
    return num_tokens / (time.perf_counter() - started_s), None


def engine_speeds(engine: LocalEngine, game: Game, round_number: int) -> Speeds:
    """Return tokens per second, and per second of processor time of all threads."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    num_tokens = asyncio.run(play(engine, game, round_number))
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    return num_tokens / wall_s, num_tokens / processor_s


def compare(
    server: VllmProcess | None, precision: str, game: Game, arguments: argparse.Namespace
) -> dict[str, Speeds]:
    """Play the rounds of all sides in turn, and return each side's medians."""
    sides: dict[str, Callable[[int], Speeds]] = {}
    for side in arguments.sides:
        if side != VLLM:
            engine = build_engine(side, arguments.model, precision, game, arguments.threads)
            sides[side] = partial(engine_speeds, engine, game)
        elif server:
            sides[side] = partial(server_speeds, server, game)
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
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=8)  # as in conf=wordle
    parser.add_argument("--reply-tokens", type=int, default=6)
    parser.add_argument("--conversations", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--threads", type=int, default=len(usable_cores()))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    installed = find_installed(find_build()) if VLLM in arguments.sides else None
    vllm = f", vllm {installed.version}" if installed else ""
    print(
        f"{datetime.date.today()}, {arguments.model}, {arguments.threads} threads "
        f"({platform.machine()}), load {os.getloadavg()[0]:.1f}, python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}{vllm}; medians of {arguments.rounds}\n"
    )
    print("| conversations | autocast | side | tokens/s | tokens/s of processor time |")
    print("|---|---|---|---|---|")
    for precision in arguments.precisions:
        model = [] if arguments.model == "tiny" else [f"model={arguments.model}"]
        started = served(model, dtype=precision, lora_rank=0) if installed else nullcontext()
        with started as server:
            for num_conversations in arguments.conversations:
                game = Game(
                    num_conversations=num_conversations,
                    num_turns=arguments.turns,
                    num_prompt_tokens=arguments.prompt_tokens,
                    num_reply_tokens=arguments.reply_tokens,
                )
                found = compare(server, precision, game, arguments)
                for side, (wall, processor) in found.items():
                    print(
                        f"| {num_conversations} | {precision} | {side} | {wall:,.0f} | "
                        f"{'' if processor is None else format(processor, ',.0f')} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
