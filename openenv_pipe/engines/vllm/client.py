"""The client of one vLLM server: completions by token id, adapters, weights, metrics."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from openenv_pipe.engines.vllm.answers import (
    Models,
    RpcResult,
    RpcResults,
    Sampled,
    ServerGoneError,
    ServerInfo,
    Tokenized,
    WorldSize,
    parse,
    read_completions,
    read_next_logprobs,
)
from openenv_pipe.engines.vllm.connection import (
    BASE,
    CALL_LIMIT_S,
    GENERATE,
    REJECTED,
    StatusError,
    VllmConnection,
)
from openenv_pipe.engines.vllm.ownership import Claim, Claimed
from openenv_pipe.errors import EngineError
from openenv_pipe.registry import if_command

Features = Mapping[str, Any]  # of images, in vLLM's format; see `image_features.py`


class Files(Protocol):
    """Brings files to a server on another machine. Raises ServerGoneError and EngineError."""

    async def send(self, folder: Path) -> Path:
        """Copy a folder to the server's machine, and return its path there."""

    async def remove(self, folder: Path) -> None:
        """Remove a copy, by its path there."""


class VllmClient(VllmConnection):
    """The client of one server. Use it in `async with`."""

    def __init__(
        self, url: str, *, api_key: str | None, request_timeout_s: float, files: Files | None = None
    ) -> None:
        """files: brings the files of this machine to the server; None: the server reads them."""
        super().__init__(url, api_key)
        self.claim: Claim | None = None  # of an attached server, while it is acquired
        self._files = files
        self._sent: dict[str, Path] = {}  # copies of adapters, by the adapters' names
        self._request_timeout_s = request_timeout_s
        # Its weights have begun to change, and are not known to be those of one version.
        self._is_between_versions = False

    async def generate(
        self,
        model: str,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        features: Features | None = None,
        vocabulary_size: int | None = None,
    ) -> list[Sampled]:
        """Sample sampling["n"] completions of one prompt, in the order of their numbers.

        sampling: `max_tokens` is needed; `n` is 1 without it.
        features: the images in the prompt.
        vocabulary_size: token ids have to be below it; None: any are accepted.

        Raises:
            ServerGoneError: there was no usable answer.
            EngineError: the server rejected the request, or answered with something else.
        """
        content = await self._generate(model, token_ids, {"logprobs": 0, **sampling}, features)
        return read_completions(
            content,
            f"{self.url}{GENERATE}",
            model=model,
            prompt=token_ids,
            sampling=sampling,
            vocabulary_size=vocabulary_size,
        )

    async def next_logprobs(
        self,
        model: str,
        token_ids: Sequence[int],
        wanted: Sequence[int],
        temperature: float,
        features: Features | None = None,
    ) -> list[float]:
        """Return the logprobs of the `wanted` ids in the distribution after the prompt.

        features: the images in the prompt.

        Raises ServerGoneError, EngineError: as `generate`.
        """
        # The sampled id comes first in the answer, which is cut to the number of ids asked for.
        asked = [*wanted, wanted[0]]
        sampling = {
            "temperature": temperature,
            "max_tokens": 1,
            "logprobs": len(asked),
            "logprob_token_ids": asked,
        }
        content = await self._generate(model, token_ids, sampling, features)
        return read_next_logprobs(content, f"{self.url}{GENERATE}", wanted)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder of this machine, to be requested by its name."""
        if self._files is not None:
            if name not in self._sent:
                self._sent[name] = await self._files.send(folder)
            folder = self._sent[name]
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name}, accepted=(404,))
        sent = self._sent.pop(name, None)
        if sent is not None and self._files is not None:
            await self._files.remove(sent)

    async def adapters(self) -> dict[str, Path]:
        """Return the folder of each loaded adapter, by the adapter's name."""
        served = parse(Models, await self._request("GET", "/v1/models"), f"{self.url}/v1/models")
        return {model.id: Path(model.root or "") for model in served.data if model.id != BASE}

    async def has_adapter(self, name: str, folder: Path) -> bool:
        """Whether the server has loaded the adapter from this folder of this machine."""
        return (await self.adapters()).get(name) == self._sent.get(name, folder)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values, including those of unfinished requests."""
        await self._post("/reset_prefix_cache?reset_running_requests=true")

    @asynccontextmanager
    async def replacing_weights(self) -> AsyncIterator[None]:
        """Pause the server during the block, in which its weights are replaced.

        Unfinished requests continue with the new weights from their next token. The server is
        resumed however the block ends, even by a cancellation, but not if it may have parts of two
        versions by then, or still load them: it samples again once it was given a whole version.
        """
        await self._confirm_claim()
        pausing = asyncio.ensure_future(self._post("/pause?mode=keep"))
        try:
            await asyncio.shield(pausing)
            yield
            await self.reset_prefix_cache()  # of the old weights
            await self._post("/reset_encoder_cache")  # what they made of images
        except (EngineError, ServerGoneError) as error:
            if not self._is_between_versions:
                raise
            kind = ServerGoneError if isinstance(error, ServerGoneError) else EngineError
            raise kind(
                f"{error}; {self.url} is left paused, as its weights may be parts of two versions: "
                "restart it if you have started it yourself"
            ) from error
        finally:
            # After a cancellation the request to pause may be unfinished; resume after it.
            await asyncio.gather(pausing, return_exceptions=True)
            if not self._is_between_versions:
                await self._post("/resume", accepted=REJECTED)

    @asynccontextmanager
    async def readable(self, folder: Path) -> AsyncIterator[Path]:
        """Within the block, give the path by which the server reads a folder of this machine."""
        if self._files is None:
            yield folder
            return
        sent = await self._files.send(folder)
        try:
            yield sent
        finally:
            await self._files.remove(sent)

    async def load_weights(self, folder: Path, version: str, limit_s: float = CALL_LIMIT_S) -> None:
        """Load all weights from a folder, given by its path for the server (`readable`).

        The server must be paused, or asleep except for the memory of its weights.
        """
        self._is_between_versions = True
        await self._tell_workers("reload_policy", limit_s, weights_path=str(folder))
        await self._name_weights(version)

    async def claim_server(
        self, owner: str, name: str, exclusive: bool, lease_s: float
    ) -> Claimed | None:
        """Claim the server for a run, or renew the claim; see `ownership.py`.

        Returns None if the server is not in vLLM's development mode, without which nobody can
        replace its weights or put it to sleep.
        """
        given: dict[str, Any] = {"owner": owner, "name": name, "exclusive": exclusive}
        try:
            results = await self._tell_workers("claim_server", **given, lease_s=lease_s)
        except StatusError as error:
            if error.status == 404:
                return None
            raise EngineError(
                f"{error}; the server needs the worker extension of this version"
                + if_command("engine", ": `openenv-pipe engine command` prints its command")
            ) from error
        held = next((each for each in results if each.holder), results[0])
        is_new = any(each.is_new for each in results)
        return Claimed(holder=held.holder, silent_s=held.silent_s, is_new=is_new)

    async def release_server(self, owner: str) -> None:
        await self._tell_workers("release_server", owner=owner)

    async def join_broadcast(self, meeting: Path) -> None:
        """Connect the workers to the learner that has made the file `meeting`."""
        await self._tell_workers("join_broadcast", meeting=str(meeting))

    async def leave_broadcast(self) -> None:
        await self._tell_workers("leave_broadcast")

    async def receive_weights(self, version: str, limit_s: float) -> None:
        """Receive all weights from the learner, under the conditions of `load_weights`."""
        self._is_between_versions = True
        await self._tell_workers("receive_policy", limit_s)
        await self._name_weights(version)

    async def resume(self) -> None:
        """Wake and resume the server, in case a killed run has left it asleep or paused.

        A server without vLLM's development mode rejects both calls, but no run can have paused it
        either.
        """
        await self._post("/wake_up", accepted=REJECTED)
        await self._post("/resume", accepted=REJECTED)

    async def can_sleep(self) -> bool:
        """Whether the server was started in development mode and with sleep mode."""
        path = "/server_info?config_format=json"
        status, content = await self._call("GET", path, None, CALL_LIMIT_S)
        if status != 200:
            return False
        return parse(ServerInfo, content, self.url + path).vllm_config.model.enable_sleep_mode

    async def sleep(self, level: int) -> None:
        """Free the GPU's memory after unfinished requests; new ones wait until `wake`."""
        await self._confirm_claim()
        await self._post(f"/sleep?level={level}&mode=wait")

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory of one of the two again; the server serves when it has both."""
        await self._confirm_claim()
        await self._post(f"/wake_up?tags={what}")

    async def metrics_text(self) -> str:
        return (await self._request("GET", "/metrics")).decode(errors="replace")

    async def chat_ids(
        self, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the token ids of the prompt that the server makes of a chat request."""
        body = {"model": model, "messages": messages, "add_generation_prompt": True}
        content = await self._post("/tokenize", {**body, "tools": tools} if tools else body)
        return parse(Tokenized, content, f"{self.url}/tokenize").tokens

    async def check_transfer(self, backend: str, learner: str) -> None:
        """Raise EngineError if vLLM's own weight transfer cannot connect to this learner.

        backend: "nccl" or "ipc".
        learner: its version of NCCL, or the UUID of its GPU.
        """
        await self._tell_workers("check_transfer", backend=backend, learner=learner)

    async def num_workers(self) -> int:
        """Return how many processes hold the server's weights, or parts of them."""
        path = "/get_world_size"
        return parse(WorldSize, await self._request("GET", path), self.url + path).world_size

    async def begin_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Connect vLLM's own weight transfer to the learner."""
        await self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)})

    async def end_transfer(self) -> None:
        """Disconnect vLLM's own weight transfer from the learner."""
        await self._post("/shutdown_weight_transfer_engine", accepted=REJECTED)

    async def start_weight_update(self) -> None:
        """Prepare for new weights, under the conditions of `load_weights`."""
        self._is_between_versions = True
        await self._post("/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any], limit_s: float) -> None:
        """Receive the described weights while the learner sends them, within a time limit."""
        await self._post("/update_weights", {"update_info": dict(update_info)}, limit_s)

    async def load_shared(self, chunk: Mapping[str, Any], buffer: Mapping[str, Any]) -> None:
        """Load the described weights from a buffer on the GPU; see `openenv_pipe_ipc`."""
        await self._tell_workers("receive_shared", chunk=dict(chunk), buffer=dict(buffer))

    async def finish_weight_update(self, version: str) -> None:
        """Use the received weights, whose version later completions report."""
        await self._post("/finish_weight_update", {"weight_version": version})
        self._is_between_versions = False

    async def _confirm_claim(self) -> None:
        if self.claim is not None:
            await self.claim.confirm()

    async def _tell_workers(
        self, method: str, limit_s: float = CALL_LIMIT_S, **arguments: Any
    ) -> list[RpcResult]:
        """Call a method of the worker extension in each worker. Raises EngineError."""
        body = {"method": method, "kwargs": arguments}
        path = "/collective_rpc"
        answer = await self._post(path, body, limit_s)
        results = parse(RpcResults, answer, self.url + path).results
        if problems := [each.problem for each in results if each.problem]:
            raise EngineError(f"{method} at {self.url}: {problems[0]}")
        return results

    async def _name_weights(self, version: str) -> None:
        """Set the version that later completions report."""
        await self._post("/update_weight_version", {"new_version": version})
        self._is_between_versions = False

    async def _generate(
        self,
        model: str,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        features: Features | None,
    ) -> bytes:
        body = {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {"detokenize": False, **sampling},
        }
        if features is not None:
            body["features"] = features
        return await self._post(GENERATE, body, self._request_timeout_s)
