"""Identify the process that made a run folder or container, and check whether it is alive."""

import socket
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

START_TOLERANCE_S = 1.0  # The kernel's clock ticks and its boot time are not exact.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


class ProcessId(BaseModel):
    """A process, identified for all time: a pid is reused, a pid with its start time is not.

    Containers can share a hostname and folders, and number their processes independently. The time
    of day can be set anew while a process runs, so its start is also counted from the boot.
    """

    # Stored in run.json and on containers, so keys of a newer version are ignored.
    model_config = ConfigDict(extra="ignore", frozen=True)

    host: str
    pid: int
    started_s: float
    # None where there is no /proc, and in what older versions have stored.
    boot: str | None = None
    namespace: str | None = None  # of the pid
    started_ticks: int | None = None  # of the kernel's clock, since the boot

    @classmethod
    def of_this_process(cls) -> "ProcessId":
        process = psutil.Process()
        return cls(
            host=socket.gethostname(),
            pid=process.pid,
            started_s=process.create_time(),
            boot=_this_boot(),
            namespace=_this_namespace(),
            started_ticks=_started_ticks(process.pid),
        )

    @property
    def alive(self) -> bool:
        """False if the process is surely gone; True where this cannot be checked.

        That is on another host, and in another namespace of pids.
        """
        if self.host != socket.gethostname():
            return True
        boot = _this_boot()
        if self.boot is not None and boot is not None and self.boot != boot:
            return False
        return not self._is_seen_here or self._runs_here

    @property
    def _is_seen_here(self) -> bool:
        """Whether this process would see it under its pid, if it is alive."""
        is_of_here = self.namespace is None or self.namespace == _this_namespace()
        return self.host == socket.gethostname() and is_of_here

    @property
    def _runs_here(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if self.started_ticks is not None:
                return _started_ticks(self.pid) == self.started_ticks
            return abs(process.create_time() - self.started_s) < START_TOLERANCE_S
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # The last two: no possible pid.
            return False

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the process and of those that it has started; None where it is not seen.

        It is the sum of their resident sets, so memory that they share counts more than once.
        """
        if not self._is_seen_here or not self.alive:
            return None
        total = 0
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for each in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += each.memory_info().rss
        return total or None


def _this_boot() -> str | None:
    """Return what tells this boot of the machine from others."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return None


def _this_namespace() -> str | None:
    """Return what tells the namespace of this process's pid from others of this boot."""
    with suppress(OSError):
        return str(NAMESPACE.readlink())
    return None


def _started_ticks(pid: int) -> int | None:
    """Return when a process has begun, in ticks since the boot; None if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        # The second field, a name in parentheses, may have spaces and parentheses itself.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None
