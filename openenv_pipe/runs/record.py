"""run.json: what a run was, what it is now, and which run it came from."""

from datetime import datetime
from typing import Literal

from pydantic import Field, JsonValue

from openenv_pipe.runs.provenance import Checkout, Machine, Record
from openenv_pipe.system.process_id import ProcessId

EndStatus = Literal["finished", "failed", "interrupted"]
Status = Literal["running", EndStatus]
LineageKind = Literal["fork", "reproduction", "recording"]


class Attempt(Record):
    """One process that worked on a run: the first, or one for each resume."""

    number: int  # logs/attempt_<number>
    command: list[str]
    started: datetime  # UTC, as is `ended`
    ended: datetime | None  # for one that died: its last trace, set by the next resume
    status: Status | Literal["died"]
    cause: str | None
    checkpoint: str | None  # the one it resumed from; None: from the beginning
    changed: dict[str, list[JsonValue]]  # changed configuration keys: [before, now]
    differences: list[str]  # what else changed since the previous attempt, as sentences


class Lineage(Record):
    """The run that this one was made from."""

    kind: LineageKind
    run: str  # its id
    path: str  # its folder at that time
    checkpoint: str | None
    changed: dict[str, list[JsonValue]]  # changed configuration keys: [that run's, this run's]


class RunRecord(Record):
    """run.json. `facts` is what the run finds out: digests, model size, device."""

    id: str  # "wordle/0007"
    status: Status
    cause: str | None
    command: list[str]  # the first attempt's, as are the next three fields
    created: datetime  # UTC, as is `ended`
    ended: datetime | None
    process: ProcessId  # the current attempt's
    config_digest: str  # sha256 of config.json
    local_code: list[str] = Field(default_factory=list)  # see runs/trust.py, as is `signature`
    signature: str | None = None
    checkouts: list[Checkout]
    code_digest: str | None = None  # of this tool's own files
    versions: dict[str, str]
    machine: Machine
    facts: dict[str, JsonValue]
    lineage: Lineage | None = None
    attempts: list[Attempt] = Field(default_factory=list)
    sweep: str | None = None  # the stamp of its sweep, whose folder is runs/sweeps/<stamp>
