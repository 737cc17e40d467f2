"""All weights of a policy, from the learner's memory into that of a server's workers: both ends.

They form a group of their own, the learner with rank 0, and meet in a file that only their user may
open. NCCL carries the weights between GPUs, gloo between CPUs, over loopback. Each wait for the
other end is bounded. Refused here: one GPU for both ends, which NCCL cannot.

The learner has this file as a part of openenv_pipe, vLLM's workers have it by its name alone, so
nothing of either is imported.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
LONGEST_WAIT = timedelta(seconds=60)  # for the other end: to come, or to go on
FILES_INSTEAD = "set engine.weight_transfer=files"


class BroadcastError(RuntimeError):
    """The two ends do not get together, for a reason that the message tells."""


class Sender:
    """The learner's end, for one server. `close` may come from another thread than `send`."""

    def __init__(self, meeting: Path) -> None:
        """meeting: a file that is not there yet, in a folder that both ends can write."""
        meeting.touch(mode=0o600)
        self.meeting = meeting
        self.is_connected = False  # the workers have come
        self._store = _store(meeting)
        self._layout: list[tuple[str, str, list[int]]] = []
        self._group: dist.Backend | None = None
        self._is_closed = False

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Blocks until the workers have all of them; the first time it waits for the workers.

        Names, types and shapes are the same every time, and all on one device. Raises
        BroadcastError, and RuntimeError if a worker does not come, or is gone.
        """
        if not self.is_connected:
            self._connect(weights)
        group = self._group
        if group is None:
            raise BroadcastError("this end is closed")
        assert _layout(weights) == self._layout, "a policy does not change its shapes"
        for tensor in weights.values():
            _broadcast(group, tensor.detach().contiguous())

    def close(self) -> None:
        """Who waits for this end, or at it, gives up. May be called again."""
        self._is_closed = True
        if not self.is_connected:
            self._tell("the learner has left")
        group, self._group = self._group, None
        _leave(group)

    def _connect(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._is_closed:
            raise BroadcastError("this end is closed")
        device = next(iter(weights.values())).device
        theirs = _read(self._store, "workers")
        if problem := _difference(_transport(device), theirs["transport"]):
            self._tell(problem)
            raise BroadcastError(problem)
        self._layout = _layout(weights)
        self._store.set("policy", json.dumps({"layout": self._layout}))
        self._group = _group(self._store, 0, 1 + theirs["count"], device)
        _broadcast(self._group, torch.zeros(1, device=device))  # NCCL connects at the first one
        self.is_connected = True

    def _tell(self, problem: str) -> None:
        """To whoever waits in the meeting, at either end."""
        for key in ("policy", "workers"):
            self._store.set(key, json.dumps({"problem": problem}))


class Receiver:
    """The end of one worker."""

    def __init__(self, meeting: Path, rank: int, num_workers: int, device: torch.device) -> None:
        """Waits for the learner. rank: of this worker, from 0 on. Raises BroadcastError, and
        RuntimeError if the learner does not come."""
        if not meeting.is_file():  # torch would look for it again and again, and stop the process
            raise BroadcastError(f"the server does not see {meeting}; {FILES_INSTEAD}")
        store = _store(meeting)
        store.set("workers", json.dumps({"count": num_workers, "transport": _transport(device)}))
        self._layout = _read(store, "policy")["layout"]
        self._device = device
        self._group: dist.Backend | None = _group(store, 1 + rank, 1 + num_workers, device)
        _broadcast(self._group, torch.zeros(1, device=device))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of one `send`, as they come. Raises RuntimeError if the learner is gone."""
        assert self._group is not None, "this end is closed"
        for name, dtype, shape in self._layout:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            _broadcast(self._group, tensor)
            yield name, tensor

    def close(self) -> None:
        """The learner, should it send, sees that nobody is there. May be called again."""
        group, self._group = self._group, None
        _leave(group)


def _store(meeting: Path) -> dist.Store:
    store = dist.FileStore(str(meeting))
    store.set_timeout(LONGEST_WAIT)
    return store


def _read(store: dist.Store, key: str) -> dict:
    """What the other end says, once it has come."""
    told = json.loads(store.get(key))
    if "problem" in told:
        raise BroadcastError(told["problem"])
    return told


def _transport(device: torch.device) -> str:
    """What has to be the same at both ends: versions of NCCL do not understand each other."""
    if device.type == "cpu":
        return "gloo"
    return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))


def _difference(learner: str, server: str) -> str:
    if learner == server:
        return ""
    return (
        f"the learner sends weights by {learner}, and the server takes them by {server}; "
        f"{FILES_INSTEAD}"
    )


def _group(store: dist.Store, rank: int, size: int, device: torch.device) -> dist.Backend:
    if device.type == "cuda":
        return _nccl_group(dist.PrefixStore("nccl", store), rank, size)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = LONGEST_WAIT
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int) -> dist.Backend:
    """Connecting can be given up, as torchft has it, too; and a wait that is over is an error of
    ours: torch's own watchdog, which blocking waits do without, would end the process."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(LONGEST_WAIT.seconds))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST_WAIT
    options.config.blocking = 0
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # read here and nowhere else
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def _leave(group: dist.Backend | None) -> None:
    """gloo's connections end with the last reference; its own `abort` would end the process."""
    if group is not None and group.name() != "gloo":
        with contextlib.suppress(RuntimeError):  # it is over in any case
            group.abort()


def _broadcast(group: dist.Backend, tensor: torch.Tensor) -> None:
    """Bytes from rank 0, of any type."""
    group.broadcast(tensor.view(-1).view(torch.uint8), 0, LONGEST_WAIT).wait(LONGEST_WAIT)


def _layout(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in weights.items()
    ]
