"""A small HTTP server in this process that answers as vLLM does, for unit tests of the engine.

A policy is one number x: the logprob of id i after any prompt is -(i + 1) * (1 + x). A file in the
folder of an adapter, or of all weights, holds x. A completion is always the same two tokens.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.build import build_transfer, running
from openenv_pipe.engines.vllm.inside.openenv_pipe_claims import Claims
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.types import NO_IMAGES

VOCABULARY = 32
VALUE = "value"
TOKENS = [7, 8]
LIMIT_S = 120.0  # of every test, so that none waits forever


def next_logprobs(value: float) -> np.ndarray:
    """Return the logprobs [V] of a policy."""
    return -(np.arange(VOCABULARY) + 1.0) * (1.0 + value)


class SmallServer:
    """Stands in for `engines.vllm.launch.VllmServer`. A test can stop it to simulate its death."""

    files = None  # it reads the folders of this machine
    key = None
    left_out = ""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.url = ""
        self.num_starts = 0
        self.num_drops = 0  # how many of the next requests lose their connection
        self.starts_dead = False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.loads_old_policies = False
        self.is_healthy = True
        self.has_development_mode = True
        self.is_paused = False
        self.resume_status = 200
        # the parts that sleep; a request that needs one of them fails
        self.asleep: set[str] = set()
        self.has_sleep_mode = True
        self.may_load = asyncio.Event()  # loading adapters and weights waits for this
        self.may_load.set()
        self.may_sample = asyncio.Event()
        self.may_sample.set()
        self.seeds: list[int] = []  # of completions
        # of all requests for completions, also of unanswered ones
        self.prompts: list[list[int]] = []
        self.calls: list[str] = []  # paths of requests that change the server, in order
        self.values: dict[str, float] = {}  # x of each loaded policy, by the name that requests use
        self.version = "default"  # the label of the weights
        # changes the answer of a completion, or replaces it by other bytes
        self.claims = Claims()
        self.roots: dict[str, str] = {}  # the folders of adapters
        self.spoil: Callable[[dict[str, Any]], bytes | None] | None = None
        self._runner: web.AppRunner | None = None
        self._dead = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        await self.may_start.wait()
        self.num_starts += 1
        self._dead = asyncio.Event()
        self.values = {"base": 0.0}
        self.version = "default"
        self.claims = Claims()
        self.asleep = set()
        with self.log.open("a") as file:
            print("ImportError: no such kernel" if self.starts_dead else "started", file=file)
        if self.starts_dead:
            self._dead.set()
            return
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/collective_rpc", self._reload)
        app.router.add_post("/update_weight_version", self._name_weights)
        app.router.add_post("/reset_prefix_cache", self._noted)
        app.router.add_post("/reset_encoder_cache", self._noted)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def died(self) -> str:
        await self._dead.wait()
        return "exit code 137"

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        self._dead.set()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total{{}} {len(self.seeds)}\n")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": name, "root": self.roots.get(name)} for name in self.values]}
        )

    async def _name_weights(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.version = (await request.json())["new_version"]
        return web.Response()

    async def _noted(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        config = {"model_config": {"enable_sleep_mode": self.has_sleep_mode}}
        return web.json_response({"vllm_config": config})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        self.asleep = {"weights", "kv_cache"}
        if request.query["level"] == "2":
            self.values = {"base": float("nan")}
        return web.Response()

    async def _wake(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        self.asleep -= set(request.query.getall("tags", self.asleep))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        await self.may_load.wait()
        self.is_paused = True
        self.calls.append("paused")
        return web.Response()

    async def _reload(self, request: web.Request) -> web.Response:
        if not self.has_development_mode:
            return web.Response(status=404)
        body = await request.json()
        method, given = body["method"], body["kwargs"]
        if method == "claim_server":
            return _of_workers(self.claims.claim(**given))
        if method == "release_server":
            self.claims.release(**given)
            return _of_workers({})
        self.calls.append(request.path)
        assert "weights" not in self.asleep
        folder = Path(given["weights_path"])
        if not self.loads_old_policies:
            self.values["base"] = float((folder / VALUE).read_text())
        return _of_workers({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if self.resume_status == 200:
            self.is_paused = False
        return web.Response(status=self.resume_status)

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        await self.may_load.wait()
        assert "weights" not in self.asleep
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.values:
            return web.Response(
                status=400, text=f"The lora adapter '{name}' has already been loaded"
            )
        old = list(self.values.values())[-1]
        self.roots[name] = str(folder)
        is_old = self.loads_old_policies and "probe" not in name
        self.values[name] = old if is_old else float((folder / VALUE).read_text())
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        return web.Response(status=404 if self.values.pop(name, None) is None else 200)

    async def _generate(self, request: web.Request) -> web.Response:
        while self.is_paused:
            await asyncio.sleep(0.01)
        assert not self.asleep
        body = await request.json()
        if self.num_drops:
            self.num_drops -= 1
            request.transport.close()
            return web.Response()
        sampling = body["sampling_params"]
        value = self.values.get(body.get("model"))
        if value is None:
            return web.Response(status=404, text=f"no model {body.get('model')}")
        if wanted := sampling.get("logprob_token_ids"):
            logprobs = next_logprobs(value)
            entries = [
                {"token_id": id, "logprob": -9999.0 if np.isnan(logprobs[id]) else logprobs[id]}
                for id in wanted
            ]
            content = [{**entries[0], "top_logprobs": entries}]
            return web.json_response({"choices": [{"logprobs": {"content": content}}]})
        self.prompts.append(body["token_ids"])
        await self.may_sample.wait()
        ids = TOKENS[: sampling["max_tokens"]]
        choice = {
            "token_ids": ids,
            "finish_reason": "stop" if ids == TOKENS else "length",
            "logprobs": {"content": [{"token_id": id, "logprob": -0.5} for id in ids]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        seed, count = sampling.get("seed"), sampling.get("n", 1)
        self.seeds += [seed + i if seed is not None else seed for i in range(count)]
        choices = [{**choice, "index": i} for i in range(count)]
        answer = {"model": body["model"], "choices": choices}
        spoilt = self.spoil(answer) if self.spoil is not None else None
        return web.Response(body=spoilt or json.dumps(answer).encode())


def _of_workers(result: dict[str, Any]) -> web.Response:
    return web.json_response({"results": [{"problem": "", **result}]})


class SmallPolicyWeights:
    """Stands in for `engines.vllm.weights.PolicyWeights`: its policy is a number."""

    lora_rank = 8
    num_freed = 0
    precision = dtype = "float32"
    vocabulary_size = VOCABULARY
    end_ids = frozenset({TOKENS[-1]})
    placeholder_id = None
    probe_images = NO_IMAGES

    def __init__(self) -> None:
        self.value = 0.25

    def write_adapter(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / VALUE).write_text(str(self.value))

    write_weights = write_adapter

    def write_probe(self, folder, prompts, temperature, *, moves) -> np.ndarray:
        folder.mkdir()
        (folder / VALUE).write_text(str(self.value + 1.0))
        return np.stack([next_logprobs(self.value + 1.0) for _ in prompts])

    def free_memory(self) -> None:
        self.num_freed += 1

    def next_logprobs(self, prompts, temperature) -> np.ndarray:
        return np.stack([next_logprobs(self.value) for _ in prompts])


@asynccontextmanager
async def run_engine(
    config: VllmEngineConfig,
    servers: Sequence[Any],
    root: Path,
    way: str = "adapter",
    *,
    name: str = "a test",
    value: float = 0.25,
    sleep_level: int = 0,
    notify: Callable[[str], None] | None = None,
) -> AsyncIterator[tuple[Any, SmallPolicyWeights, list[str]]]:
    """Run an engine of the run `name` on these servers; yield it, its policy, and what it says."""
    root.mkdir()
    source, told = SmallPolicyWeights(), []
    source.value = value
    async with asyncio.timeout(LIMIT_S):
        with ThreadPoolExecutor(1) as executor:
            transfer = build_transfer(config, way, source, root, executor)
            async with running(
                config,
                source,
                Versions(transfer, Owner.new(name), root.name),
                servers,
                root=root,
                executor=executor,
                sleep_level=sleep_level,
                facts={},
                notify=notify or told.append,
            ) as engine:
                yield engine, source, told
