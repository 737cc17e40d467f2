"""Identify the process that made a run folder or container, and check whether it is alive."""

import socket
from contextlib import suppress

import psutil
from pydantic import BaseModel, ConfigDict

START_TOLERANCE_S = 1.0  # The kernel's clock ticks and its boot time are not exact.


class ProcessId(BaseModel):
    """A process, identified for all time: a pid is reused, a pid with its start time is not."""

    # Stored in run.json and on containers, so keys of a newer version are ignored.
    model_config = ConfigDict(extra="ignore", frozen=True)

    host: str
    pid: int
    started_s: float

    @classmethod
    def of_this_process(cls) -> "ProcessId":
        process = psutil.Process()
        return cls(host=socket.gethostname(), pid=process.pid, started_s=process.create_time())

    @property
    def alive(self) -> bool:
        """False if the process is gone; True on another host, where this cannot be checked."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.started_s) < START_TOLERANCE_S
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # The last two: no possible pid.
            return False

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the process and of those that it has started; None on another host.

        It is the sum of their resident sets, so memory that they share counts more than once.
        """
        if self.host != socket.gethostname() or not self.alive:
            return None
        total = 0
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for each in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += each.memory_info().rss
        return total or None
