"""run.json: what a run was, what it is now, and which run it came from."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, FailFast, Field, JsonValue

from openenv_pipe.runs.places import FORMAT
from openenv_pipe.runs.provenance import Checkout, Machine, Record, Texts
from openenv_pipe.system.process_id import ProcessId

EndStatus = Literal["finished", "failed", "interrupted"]
Status = Literal["running", EndStatus]
MAX_ATTEMPTS = 10**6
CHECKPOINT = r"^(step|warm_start)_\d{6,12}$"
LineageKind = Literal["fork", "reproduction", "recording"]
Purpose = Literal["training", "evaluation"]


class AttemptRecord(Record):
    """One process that worked on a run: the first, or one for each resume."""

    number: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)]  # logs/attempt_<number>
    command: Texts
    started: AwareDatetime  # UTC, as is `ended`
    ended: AwareDatetime | None  # for one that died: its last trace, set by the next resume
    status: Status | Literal["died"]
    cause: str | None
    checkpoint: str | None  # the one it resumed from; None: from the beginning
    changed: dict[str, list[JsonValue]]  # changed configuration keys: [before, now]
    differences: Texts  # what else changed since the previous attempt, as sentences


class Lineage(Record):
    kind: LineageKind
    run: str  # its id
    path: str  # its folder at that time
    checkpoint: Annotated[str, Field(pattern=CHECKPOINT)] | None
    changed: dict[str, list[JsonValue]]  # changed configuration keys: [that run's, this run's]

    @property
    def title(self) -> str:
        """Return the origin in words: `fork of wordle/0007@step_000040`."""
        return f"{self.kind} of {self.run}" + (f"@{self.checkpoint}" if self.checkpoint else "")


class RunRecord(Record):
    """run.json. `facts` is what the run finds out: digests, model size, device."""

    format: int = FORMAT  # of the run folder
    id: Annotated[str, Field(pattern=r"^[\w.-]+/\d+$")]  # "wordle/0007"
    purpose: Purpose = "training"  # evaluation: of a model that no run has trained
    status: Status
    cause: str | None
    command: Texts  # the first attempt's, as are the next three fields
    created: AwareDatetime  # UTC, as is `ended`
    ended: AwareDatetime | None
    process: ProcessId  # the current attempt's
    config_digest: str  # sha256 of config.json
    local_code: Texts  # see runs/trust.py, as is `signature`
    signature: str | None
    checkouts: Annotated[list[Checkout], FailFast()]
    code_digest: str  # of this tool's own files
    versions: dict[str, str]
    machine: Machine
    facts: dict[str, JsonValue]
    lineage: Lineage | None = None
    attempts: Annotated[list[AttemptRecord], Field(min_length=1), FailFast()]
    sweep: str | None = None  # the stamp of its sweep, whose folder is runs/sweeps/<stamp>

    @property
    def is_training(self) -> bool:
        """Whether it trained anew: it is neither an evaluation nor a reproduction."""
        is_reproduction = self.lineage is not None and self.lineage.kind == "reproduction"
        return self.purpose == "training" and not is_reproduction

    @property
    def version(self) -> str:
        """The version of this program that made the run."""
        return self.versions.get("openenv-pipe", "an unknown version")
