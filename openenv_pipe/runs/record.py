"""run.json: what a run was, is, and came from."""

from datetime import datetime
from typing import Literal

from pydantic import Field, JsonValue

from openenv_pipe.runs.provenance import Checkout, Machine, Record
from openenv_pipe.system.process_id import ProcessId

EndStatus = Literal["finished", "failed", "interrupted"]
Status = Literal["running", EndStatus]
LineageKind = Literal["fork", "reproduction", "recording"]


class Attempt(Record):
    """One process that worked on a run. The first is the run's own; each resume adds one."""

    number: int  # logs/attempt_<number>
    command: list[str]
    started: datetime  # UTC, as is `ended`
    ended: datetime | None  # of one that died: its last sign of life, once it is resumed
    status: Status | Literal["died"]
    cause: str | None
    checkpoint: str | None  # that it went on from; None: from the beginning
    changed: dict[str, list[JsonValue]]  # keys of the configuration: before, now
    differences: list[str]  # what else is not as it was at the attempt before, in words


class Lineage(Record):
    """The run that this one was made from."""

    kind: LineageKind
    run: str  # its id
    path: str  # its folder, at that time
    checkpoint: str | None
    changed: dict[str, list[JsonValue]]  # keys of the configuration: there, here


class RunRecord(Record):
    """run.json. `facts` is what the run learns on its way: digests, model size, device."""

    id: str  # "wordle/0007"
    status: Status
    cause: str | None
    command: list[str]  # of the first attempt, as are the next three
    created: datetime  # UTC, as is `ended`
    ended: datetime | None
    process: ProcessId  # of the current attempt
    config_digest: str  # sha256 of config.json
    checkouts: list[Checkout]
    code_digest: str | None = None  # of this tool's own files
    versions: dict[str, str]
    machine: Machine
    facts: dict[str, JsonValue]
    lineage: Lineage | None = None
    attempts: list[Attempt] = Field(default_factory=list)
    sweep: str | None = None  # the stamp of the sweep that it is a job of: runs/sweeps/<stamp>
