"""Which process made something: a run folder, a container. Tells the living from the dead."""

import socket

import psutil
from pydantic import BaseModel, ConfigDict

START_TOLERANCE_S = 1.0  # the kernel's clock ticks and its boot time are not exact


class ProcessId(BaseModel):
    """One process for all time: a pid is used again, a pid with its start time is not."""

    # Written into run.json and onto containers: keys of a newer version are passed over.
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
        """False if the process is gone; True on another host, where nobody can tell from here."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.started_s) < START_TOLERANCE_S
        except psutil.NoSuchProcess:
            return False
