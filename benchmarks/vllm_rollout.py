"""Compare tokens per second of rollouts with vLLM and of raw requests, and time publishing.

A round plays episodes of Wordle on a local environment server. A bare loop then sends the same
requests (prompts, lengths, seeds) with the same concurrency, and parses the answers as JSON. The
prefix cache is emptied before each. Replies have the maximal length, because the model's weights
are random.

    python benchmarks/vllm_rollout.py [--sessions 16 64] [--reply-tokens 6 48] [--url URL]
    python benchmarks/vllm_rollout.py --only rollouts --pretrained smollm2_135m --publish merged
    python benchmarks/vllm_rollout.py --only publishing --model hidden_size=512 num_layers=6
    python benchmarks/vllm_rollout.py --only publishing --device cuda --transfers files ipc

On GPUs, the server has the transfer that `--transfers` names beside files. For broadcast it runs on
the second GPU.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.base import turn_seed
from openenv_pipe.engines.vllm import LearnerFootprint, open_engine
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.engine import VllmEngine
from openenv_pipe.engines.vllm.installed import find_build, find_installed
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.tasks import known_splits, open_splits
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.system.http import bearer
from openenv_pipe.types import Episode

GROUP_SIZE = 8
EPISODES_PER_SESSION = 2
NUM_WARMUPS = 2  # publishes that are not measured
MAX_TOKENS = 1024
RANK = 8
WAYS = (  # to publish: which weights, by which transfer, and LoRA's rank
    ("adapter", "files", RANK),
    ("merged", "files", RANK),
    ("merged", "broadcast", RANK),
    ("full", "files", 0),
    ("full", "broadcast", 0),
    ("merged", "ipc", RANK),
    ("full", "ipc", 0),
)
START_LIMIT_S = 600.0


def configured(num_sessions: int, reply_tokens: int, *more: str) -> RunConfig:
    is_tiny = not any(each.startswith("model=") for each in more)
    return compose(
        [
            *("conf=wordle", "engine=vllm", "model.autocast=float32", "device=cpu"),
            f"host.sessions_per_server={num_sessions}",
            f"env.max_reply_tokens={reply_tokens}",
            f"env.max_episode_tokens={MAX_TOKENS}",
            *([f"model.max_length={MAX_TOKENS}"] if is_tiny else []),
            *more,
        ]
    ).config


@asynccontextmanager
async def engine_of(config: RunConfig, logs: Path) -> AsyncIterator[tuple[VllmEngine, Policy]]:
    policy = load_policy(config.model, seed=0, device=torch.device(config.device))
    with ThreadPoolExecutor(1) as executor:
        async with open_engine(
            config.engine,
            PolicyWeights(policy),
            source=None,
            footprint=LearnerFootprint(on_gpu=policy.device.type == "cuda"),
            logs=logs,
            executor=executor,
            notify=lambda text: print(text, file=sys.stderr),
        ) as engine:
            yield engine, policy


@contextmanager
def served(
    model: Sequence[str],
    transfers: Sequence[str] = (),
    *,
    dtype: str = "float32",
    lora_rank: int = RANK,
) -> Iterator[VllmProcess]:
    """Start a server for all measurements. model: overrides of the tiny one."""
    installed = find_installed(find_build())
    if installed is None:
        raise SystemExit("vLLM is not installed: openenv-pipe engine install vllm")
    config = configured(8, 6, *model)
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        PolicyWeights(policy).write_base(base)
        spec = ServerSpec(
            model=str(base),
            revision=None,
            build=installed.build,
            dtype=dtype,
            lora_rank=lora_rank,
            **placed(installed.build, transfers),
        )
        server = VllmProcess(spec, config.engine, installed.python, Path(folder) / "engine.log")
        try:
            asyncio.run(wait_for(server))
            yield server
        finally:
            asyncio.run(server.stop())


def placed(build: str, transfers: Sequence[str]) -> dict[str, Any]:
    """Return how the server gets weights, and on which GPU it runs."""
    if build == "cpu" or not {"ipc", "broadcast"} & set(transfers):
        return {}
    if "ipc" in transfers:
        return {"transfer_backend": "ipc"}
    if torch.cuda.device_count() < 2:
        raise SystemExit("--transfers broadcast needs two GPUs, and this machine has fewer")
    return {"transfer_backend": "nccl", "placement": {"CUDA_VISIBLE_DEVICES": "1"}}


async def wait_for(server: VllmProcess) -> None:
    await server.start()
    async with (
        VllmClient(server.url, api_key=server.key, request_timeout_s=60) as client,
        asyncio.timeout(START_LIMIT_S),
    ):
        while not await client.is_healthy(5.0):
            await asyncio.sleep(0.2)


def requests_of(episode: Episode, model: str, end_id: int) -> list[bytes]:
    """Return the bodies of an episode's requests."""
    bodies, ids = [], []
    for number, turn in enumerate(episode.turns):
        ids += turn.prompt_ids
        sampling = {
            "temperature": 1.0,
            "max_tokens": len(turn.completion_ids),
            "seed": turn_seed(episode.seed, number),
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
            "stop_token_ids": [end_id],
        }
        bodies.append(
            json.dumps({"model": model, "token_ids": ids, "sampling_params": sampling}).encode()
        )
        ids += turn.completion_ids
    return bodies


async def raw(
    url: str, key: str | None, episodes: Sequence[Sequence[bytes]], num_at_work: int
) -> float:
    """Measure the tokens per second of a bare loop."""
    queue, num_tokens = iter(episodes), 0
    address, headers = f"{url}/inference/v1/generate", {"Content-Type": "application/json"}
    headers |= bearer(key).headers

    async def work(http: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        for bodies in queue:
            for body in bodies:
                async with http.post(address, data=body, headers=headers) as response:
                    answer = json.loads(await response.read())
                num_tokens += len(answer["choices"][0]["token_ids"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        started = time.perf_counter()
        await asyncio.gather(*(work(http) for _ in range(num_at_work)))
        return num_tokens / (time.perf_counter() - started)


async def rollouts(config: RunConfig, num_rounds: int) -> list[tuple[float, float]]:
    """Return for each round the tokens per second of the pipeline and of the bare loop."""
    num_sessions, pairs = config.host.sessions_per_server, []
    num_episodes = num_sessions * EPISODES_PER_SESSION
    with tempfile.TemporaryDirectory() as logs:
        host = build_host(config, Path(logs))
        try:
            await host.start()
            splits = await open_splits(config, known_splits(config), host.urls[0], host.access)
            async with engine_of(config, Path(logs)) as (engine, policy):
                client = await engine.replicas[0].serving()
                context = RolloutContext(
                    env=config.env,
                    loop=LocalRunner(host, build_adapter(config.env.adapter)),
                    splits=splits,
                    chat=policy.chat,
                    engine=engine,
                    scorer=Scorer(config.reward, config.env.success_reward),
                )
                for number in range(num_rounds + 1):
                    await client.reset_prefix_cache()
                    started = time.perf_counter()
                    groups = await play_groups(
                        context,
                        [splits.train[i] for i in range(num_episodes // GROUP_SIZE)],
                        group_size=GROUP_SIZE,
                        temperature=1.0,
                        seed=number,
                        label="benchmark",
                    )
                    took_s = time.perf_counter() - started
                    episodes = [episode for group in groups for episode in group.episodes]
                    ours = sum(episode.num_completion_tokens for episode in episodes) / took_s
                    bodies = [
                        requests_of(e, engine.replicas[0].model, min(policy.end_ids))
                        for e in episodes
                    ]
                    await client.reset_prefix_cache()
                    bare = await raw(client.url, config.engine.api_key, bodies, num_sessions)
                    if number:  # The first round warms up.
                        pairs.append((ours, bare))
        finally:
            await host.close()
    return pairs


async def publishing(config: RunConfig, num_published: int) -> dict[str, float]:
    """Return the bytes published, and times in milliseconds: publishing's median and 90th
    percentile, and the logprob check's median."""
    with tempfile.TemporaryDirectory() as logs:
        async with engine_of(config, Path(logs)) as (engine, policy):
            if engine.facts()["engine"]["publish"] == "adapter":
                sent = [values for _, values in policy.trained_parameters()]
            else:
                sent = list(PolicyWeights(policy).tensors().values())
            times, checks = [], []
            for version in range(1, num_published + NUM_WARMUPS + 1):
                for _, parameter in policy.trained_parameters():
                    parameter.data += 0.001 * torch.randn_like(parameter)
                await engine.publish(version)
                measured = await engine.metrics()
                times.append(1e3 * measured["time/publish_s"])
                checks.append(1e3 * measured["time/logprob_check_s"])
    times, checks = times[NUM_WARMUPS:], checks[NUM_WARMUPS:]
    return {
        "bytes": sum(values.nbytes for values in sent),
        "median_ms": statistics.median(times),
        "slow_ms": sorted(times)[int(0.9 * len(times))],
        "check_ms": statistics.median(checks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--reply-tokens", type=int, nargs="+", default=[6, 48])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["rollouts", "publishing"])
    parser.add_argument("--url", help="of a server that runs already; VLLM_API_KEY: its key")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transfers", nargs="+", default=["files", "broadcast"])
    parser.add_argument("--published", type=int, default=20, help="times for each way")
    parser.add_argument("--output", type=Path, help="a file for the figures of publishing, JSON")
    parser.add_argument("--model", nargs="+", default=[], help="as in hidden_size=512")
    parser.add_argument("--pretrained", help="a file of conf/model instead of tiny")
    parser.add_argument("--publish", choices=["adapter", "merged"], default="adapter")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = [f"model={arguments.pretrained}"] if arguments.pretrained else []
    model += [f"model.{override}" for override in arguments.model]
    with server_of(arguments, model) as attach:
        measure(arguments, [*attach, f"device={arguments.device}", *model])


@contextmanager
def server_of(arguments: argparse.Namespace, model: Sequence[str]) -> Iterator[list[str]]:
    """Yield the settings that attach to the server of `--url`, or to one for all measurements."""
    attach = ["engine.launch=attach"]
    if arguments.url:
        key = os.environ.get("VLLM_API_KEY", "null")
        yield [*attach, f"engine.url={arguments.url}", f"engine.api_key={key}"]
        return
    rank = RANK if arguments.publish == "adapter" or arguments.only != "rollouts" else 0
    with served(model, arguments.transfers, lora_rank=rank) as server:
        yield [*attach, f"engine.url={server.url}", f"engine.api_key={server.key}"]


def measure(arguments: argparse.Namespace, attach: list[str]) -> None:
    if arguments.only != "publishing":
        print("| sessions | tokens a reply | raw, tokens/s | pipeline, tokens/s | share |")
        print("|---|---|---|---|---|")
        for num_sessions in arguments.sessions:
            for reply_tokens in arguments.reply_tokens:
                adapter = [f"model.lora.rank={RANK}", f"engine.publish={arguments.publish}"]
                config = configured(num_sessions, reply_tokens, *adapter, *attach)
                pairs = asyncio.run(rollouts(config, arguments.rounds))
                ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
                share = statistics.median(pair[0] / pair[1] for pair in pairs)
                print(
                    f"| {num_sessions} | {reply_tokens} | {bare:.0f} | {ours:.0f} | {share:.0%} |",
                    flush=True,
                )
    if arguments.only != "rollouts":
        figures = measure_publishing(arguments, attach)
        if arguments.output:
            arguments.output.write_text(json.dumps({"published": figures}, indent=2) + "\n")


def measure_publishing(arguments: argparse.Namespace, attach: list[str]) -> list[dict[str, Any]]:
    """Print a row for each way to publish, and return the rows."""
    print("\n| what is published | over | MB | median, ms | MB/s | slowest tenth, ms | check, ms |")
    print("|" + "---|" * 7)
    rows = []
    for way, transfer, rank in WAYS:
        if transfer not in arguments.transfers:
            continue
        more = [f"model.lora.rank={rank}", f"engine.publish={way}", *attach]
        config = configured(8, 6, f"engine.weight_transfer={transfer}", *more)
        found = asyncio.run(publishing(config, arguments.published))
        rows.append({"device": arguments.device, "publish": way, "transfer": transfer, **found})
        size = found["bytes"] / 1e6
        speed = 1e3 * size / found["median_ms"]
        times = f"{found['median_ms']:.0f} | {speed:.0f} | {found['slow_ms']:.0f}"
        print(
            f"| {way} | {transfer} | {size:.1f} | {times} | {found['check_ms']:.0f} |", flush=True
        )
    return rows


if __name__ == "__main__":
    main()
