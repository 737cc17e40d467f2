"""Compare the tokens per second of the local engine's two forward passes.

The model is `tiny` with random weights. Both sides sample the same conversations, of several turns
with random prompts, in alternation in one process: the model's own modules in one batch with
several threads of torch, as other models are sampled, and the fast pass in lanes, with as many
threads of one core each. There is no environment, so the figures are those of the engine alone.

    PYTHONPATH=. python benchmarks/sampling.py [--conversations 64 256] [--rounds 7]
"""

import argparse
import asyncio
import datetime
import os
import platform
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import transformers

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import TokenRequest
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.models.load import load_policy
from openenv_pipe.pipeline.build import prepare_thread
from openenv_pipe.system.process import usable_cores

NUM_TURNS = 6
NUM_PROMPT_TOKENS = 8  # of a turn, as in conf=wordle with model=tiny
NUM_REPLY_TOKENS = 6
OWN, FAST = "own modules", "fast pass"
NO_END = -1  # no token ends a reply, so that all have the same length


def build_engine(
    side: str, precision: str, num_conversations: int, num_threads: int
) -> LocalEngine:
    config = compose(["conf=wordle", f"model.autocast={precision}"]).config
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    policy.end_id = NO_END
    if side == OWN:
        policy.slow_forward_reason = "this side measures the model's own modules"
    prepare = partial(prepare_thread, num_threads if side == OWN else 1)
    executor = ThreadPoolExecutor(1 if side == OWN else num_threads, "sampler", prepare)
    return LocalEngine(
        policy, max_episodes=num_conversations, executor=executor, in_lanes=side == FAST
    )


async def play(engine: LocalEngine, round_number: int) -> int:
    """Play all conversations and return the number of sampled tokens."""
    engine.begin_collection(engine.max_episodes, engine.max_episodes)

    async def converse(episode: int) -> int:
        draw = random.Random(f"{round_number}/{episode}")
        num_tokens = 0
        for turn in range(NUM_TURNS):
            request = TokenRequest(
                episode=episode,
                turn=turn,
                new_ids=[draw.randrange(5, 250) for _ in range(NUM_PROMPT_TOKENS)],
                max_tokens=NUM_REPLY_TOKENS,
                temperature=1.0,
                seed=episode,
            )
            num_tokens += len((await engine.generate(request)).token_ids)
        engine.end_episode(episode)
        return num_tokens

    return sum(await asyncio.gather(*map(converse, range(engine.max_episodes))))


def speeds(engine: LocalEngine, round_number: int) -> tuple[float, float]:
    """Return tokens per second, and per second of processor time of all threads."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    num_tokens = asyncio.run(play(engine, round_number))
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    return num_tokens / wall_s, num_tokens / processor_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=len(usable_cores()))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(
        f"{datetime.date.today()}, {arguments.threads} threads ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f}, python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; medians of {arguments.rounds}\n"
    )
    print("| conversations | autocast | side | tokens/s | tokens/s of processor time |")
    print("|---|---|---|---|---|")
    for num_conversations in arguments.conversations:
        for precision in arguments.precisions:
            make = partial(
                build_engine,
                precision=precision,
                num_conversations=num_conversations,
                num_threads=arguments.threads,
            )
            engines = {side: make(side) for side in (OWN, FAST)}
            found: dict[str, list[tuple[float, float]]] = {side: [] for side in engines}
            for round_number in range(arguments.rounds + 1):  # the first one warms up
                for side, engine in engines.items():
                    found[side].append(speeds(engine, round_number))
            for side, values in found.items():
                wall, processor = map(statistics.median, zip(*values[1:], strict=True))
                print(
                    f"| {num_conversations} | {precision} | {side} | {wall:,.0f} | "
                    f"{processor:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
