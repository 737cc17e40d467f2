"""Send all weights of a policy from the learner's memory into that of a server's workers.

Learner and workers form a process group in which the learner has rank 0. They exchange addresses in
a file that only their user may open. gloo transports the weights between CPUs, over loopback. Each
wait for the other end has a time limit. Between GPUs, vLLM's own weight transfer is used instead.

The learner imports this file as a part of openenv_pipe, and vLLM's workers import it as a
top-level module, so it imports neither package.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LONGEST_WAIT = timedelta(seconds=60)  # for the other end to connect or to continue
FILES_INSTEAD = "set engine.weight_transfer=files"  # ends error messages


class BroadcastError(RuntimeError):
    """The two ends cannot connect, for the reason in the message."""


class Sender:
    """The learner's end, for one server. Another thread than that of `send` may call `close`."""

    def __init__(self, meeting: Path) -> None:
        """meeting: the path of a new file, in a folder that both ends can write."""
        meeting.touch(mode=0o600)
        self.meeting = meeting
        self.is_connected = False  # to the workers
        self._store = _store(meeting)
        self._layout: list[tuple[str, str, list[int]]] = []
        self._group: dist.Backend | None = None
        self._is_closed = False

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Send weights, and block until the workers have all of them.

        Names, types and shapes are the same in each call, and all tensors are on one device.

        Raises:
            BroadcastError: this end is closed, or the two ends cannot connect.
            RuntimeError: a worker does not connect in time, or is gone.
        """
        if not self.is_connected:
            self._connect(weights)
        group = self._group
        if group is None:
            raise BroadcastError("this end is closed")
        assert _layout(weights) == self._layout, "the shapes of a policy's weights have changed"
        for tensor in weights.values():
            # A sharded policy gathers each tensor when its turn has come.
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            _broadcast(group, whole.detach().contiguous())

    def close(self) -> None:
        """Disconnect, and end all waits of both ends. Repeating it does no harm."""
        self._is_closed = True
        if not self.is_connected:
            self._notify("the learner has left")
        self._group = None  # gloo disconnects when nothing refers to the group any more

    def _connect(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._is_closed:
            raise BroadcastError("this end is closed")
        theirs = _read(self._store, "workers")
        if (device := theirs["device"]) != "cpu":
            problem = f"the learner's weights are on a CPU, but the server's on {device}"
            self._notify(f"{problem}; {FILES_INSTEAD}")
            raise BroadcastError(f"{problem}; {FILES_INSTEAD}")
        self._layout = _layout(weights)
        self._store.set("policy", json.dumps({"layout": self._layout}))
        self._group = _group(self._store, 0, 1 + theirs["count"])
        self.is_connected = True

    def _notify(self, problem: str) -> None:
        """Report a problem to both ends, which may be waiting for each other."""
        for key in ("policy", "workers"):
            self._store.set(key, json.dumps({"problem": problem}))


class Receiver:
    """The end of one worker."""

    def __init__(self, meeting: Path, rank: int, num_workers: int, device: torch.device) -> None:
        """Wait for the learner, and connect to it.

        rank: of this worker, from 0 on.

        Raises:
            BroadcastError: the two ends cannot connect.
            RuntimeError: the learner does not connect in time.
        """
        if not meeting.is_file():  # torch would retry, and then end the process
            raise BroadcastError(f"the server does not see {meeting}; {FILES_INSTEAD}")
        store = _store(meeting)
        store.set("workers", json.dumps({"count": num_workers, "device": device.type}))
        self._layout = _read(store, "policy")["layout"]
        self._group: dist.Backend | None = _group(store, 1 + rank, 1 + num_workers)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the weights of one `send`. Raises RuntimeError if the learner is gone."""
        assert self._group is not None, "this end is closed"
        for name, dtype, shape in self._layout:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            _broadcast(self._group, tensor)
            yield name, tensor

    def close(self) -> None:
        """Disconnect, so that the learner's next `send` fails. Repeating it does no harm."""
        self._group = None


def _store(meeting: Path) -> dist.Store:
    store = dist.FileStore(str(meeting))
    store.set_timeout(LONGEST_WAIT)
    return store


def _read(store: dist.Store, key: str) -> dict:
    """Wait for what the other end writes, and return it."""
    told = json.loads(store.get(key))
    if "problem" in told:
        raise BroadcastError(told["problem"])
    return told


def _group(store: dist.Store, rank: int, size: int) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = LONGEST_WAIT
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)


def _broadcast(group: dist.Backend, tensor: torch.Tensor) -> None:
    """Broadcast a tensor of any type from rank 0, as bytes."""
    group.broadcast(tensor.view(-1).view(torch.uint8), 0, LONGEST_WAIT).wait(LONGEST_WAIT)


def _layout(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in weights.items()
    ]
