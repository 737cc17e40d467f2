"""All weights of a policy, from the learner's memory into that of a server's workers: both ends.

They form a group of their own, the learner with rank 0, and meet in a file, which who may not open
it cannot join. NCCL carries the weights between GPUs; between CPUs it is gloo, over loopback. No
wait is longer than a minute. Refused here: one GPU for both ends, which NCCL cannot.

The learner has this file as a part of openenv_pipe, vLLM's workers have it by its name alone, so
nothing of either is imported.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LONGEST_WAIT = timedelta(seconds=60)  # for the other end: to come, and to go on


class BroadcastError(RuntimeError):
    """The two ends cannot understand each other."""


class Sender:
    """The learner's end, for one server. `close` may come from another thread than `send`."""

    def __init__(self, meeting: Path) -> None:
        """meeting: a file that is not there yet, in a folder that both ends can write."""
        self.meeting = meeting
        self._layout: list[tuple[str, str, list[int]]] = []
        self._group: dist.Backend | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the workers have come to the meeting."""
        return self._group is not None

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Blocks until the workers have all of them; the first time it waits for the workers.

        Names, types and shapes are the same every time, and all on one device. Raises
        BroadcastError, and RuntimeError if a worker does not come, or is gone.
        """
        group = self._group or self._connect(weights)
        assert _layout(weights) == self._layout, "a policy does not change its shapes"
        for tensor in weights.values():
            _broadcast(group, tensor.detach().contiguous())

    def _connect(self, weights: Mapping[str, torch.Tensor]) -> dist.Backend:
        store, device = _store(self.meeting), next(iter(weights.values())).device
        theirs = json.loads(store.get("workers"))
        if problem := _difference(_transport(device), theirs["transport"]):
            store.set("policy", json.dumps({"problem": problem}))
            raise BroadcastError(problem)
        self._layout = _layout(weights)
        store.set("policy", json.dumps({"problem": "", "layout": self._layout}))
        self._group = _group(store, 0, 1 + theirs["count"], device)
        return self._group

    def close(self) -> None:
        """Who waits for NCCL gives up at once. May be called again."""
        group, self._group = self._group, None
        _leave(group)


class Receiver:
    """The end of one worker."""

    def __init__(self, meeting: Path, rank: int, num_workers: int, device: torch.device) -> None:
        """Waits for the learner. rank: of this worker, from 0 on. Raises BroadcastError, and
        RuntimeError if the learner does not come."""
        store = _store(meeting)
        store.set("workers", json.dumps({"count": num_workers, "transport": _transport(device)}))
        policy = json.loads(store.get("policy"))
        if policy["problem"]:
            raise BroadcastError(policy["problem"])
        self._layout = policy["layout"]
        self._device = device
        self._group: dist.Backend | None = _group(store, 1 + rank, 1 + num_workers, device)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of one `send`, as they come. Raises RuntimeError if the learner is gone."""
        assert self._group is not None, "this end is closed"
        for name, dtype, shape in self._layout:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            _broadcast(self._group, tensor)
            yield name, tensor

    def close(self) -> None:
        """The learner, should it send, sees that nobody is there."""
        group, self._group = self._group, None
        _leave(group)


def _store(meeting: Path) -> dist.Store:
    store = dist.FileStore(str(meeting))
    store.set_timeout(LONGEST_WAIT)
    return store


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
        "engine.weight_transfer=files needs neither"
    )


def _group(store: dist.Store, rank: int, size: int, device: torch.device) -> dist.Backend:
    """Its first broadcast follows at once: it is then that NCCL connects."""
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = LONGEST_WAIT
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONGEST_WAIT
        group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    _broadcast(group, torch.zeros(1, device=device))
    return group


def _leave(group: dist.Backend | None) -> None:
    """gloo's connections end with the last reference; its own `abort` would end the process."""
    if group is not None and group.name() != "gloo":
        group.abort()


def _broadcast(group: dist.Backend, tensor: torch.Tensor) -> None:
    """Bytes from rank 0, of any type."""
    group.broadcast(tensor.view(-1).view(torch.uint8), 0, LONGEST_WAIT).wait(LONGEST_WAIT)


def _layout(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in weights.items()
    ]
