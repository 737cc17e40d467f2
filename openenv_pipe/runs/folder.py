"""The run folder, which stays readable when the run is killed at any instant.

    runs/wordle/0007/
      run.json config.json overrides.txt dirty.diff     what was run, by whom, on what
      metrics.jsonl episodes/ episode_index.sqlite checkpoints/ eval/ plots/ report.md
      logs/attempt_1/  logs/latest ->                   images/ if observations have some
    runs/wordle/latest ->

A folder is filled beside its place and renamed to the next free number, so it is complete or
absent, and two processes never get the same one. Secrets are left out (`config/secrets.py`).
Folders and checkpoints that exist are never overwritten.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from openenv_pipe import __version__
from openenv_pipe.config.compose import amend
from openenv_pipe.config.error_messages import explain_validation, first_problem
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_assignments, hide_in_config, known_secrets
from openenv_pipe.config.used_secrets import restore_used
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.allocation import (
    allocate,
    describe,
    described_config,
    make_subfolders,
    open_logs,
    signed,
    without_secrets,
    write_config,
)
from openenv_pipe.runs.checkpoints import all_checkpoints
from openenv_pipe.runs.places import FORMAT, instead_of_run, note_runs_folder
from openenv_pipe.runs.record import (
    AttemptRecord,
    EndStatus,
    Lineage,
    LineageKind,
    Purpose,
    RunRecord,
)
from openenv_pipe.runs.trust import check_trust
from openenv_pipe.system.file_lock import locked
from openenv_pipe.system.files import (
    digest_of_bytes,
    name_beside,
    parse_json,
    point_symlink,
    read_bytes,
    read_json,
    reject_links,
    write_bytes,
    write_json,
    write_text,
)
from openenv_pipe.system.process_id import ProcessId
from openenv_pipe.system.untrusted_text import MAX_LENGTH, for_people


class RunFolder:
    """One run folder, from `create` or `open`. Only the run's own process writes to it."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self._is_held = False

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        overrides: Sequence[str],
        command: Sequence[str],
        sweep: str | None = None,
        lineage: Lineage | None = None,
        purpose: Purpose = "training",
    ) -> "RunFolder":
        """Create the next folder of `config.name` and describe the run in it.

        sweep: the stamp of the run's sweep. lineage: the run that this one is made from.
        purpose: what it is for: a run for an evaluation trains nothing.

        Raises RunFolderError if `config.runs_dir` cannot be written to.
        """
        parent = Path(config.runs_dir) / config.name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            aside = name_beside(parent / "new")
            aside.mkdir()
        except OSError as error:
            raise RunFolderError(
                f"cannot create a run folder in {parent}: {error}; set runs_dir to a writable "
                "folder"
            ) from error
        try:
            record = describe(aside, config, overrides, command)
            record |= {"sweep": sweep, "lineage": without_secrets(lineage, config)}
            record["purpose"] = purpose
            path = allocate(aside, parent, config.name, record)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        note_runs_folder(parent.parent)
        made = cls(path, _read_record(path))
        if made.record.is_training:
            point_symlink(parent / "latest", path.name)
        return made

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """Open an existing folder, also through a `latest` link.

        Raises RunFolderError: It is missing, not a run folder, of another format, or its run.json
        is damaged.
        """
        path = Path(path)
        if path.name in ("", ".."):  # Other folders are named after the run's.
            path = path.resolve()
        if path.is_symlink():
            path = path.parent / path.readlink()
        if not path.is_dir():
            raise RunFolderError(f"no folder {path}; `openenv-pipe runs` lists the run folders")
        if not (path / "run.json").is_file():
            hint = instead_of_run(path)
            raise RunFolderError(f"{path} is not a run folder: it has no run.json; {hint}")
        return cls(path, _read_record(path))

    def config_to_run(
        self,
        overrides: Sequence[str] = (),
        *,
        trust: bool = False,
        secrets_of: Collection[str] | None = None,
    ) -> RunConfig:
        """Return the configuration to act on, with hidden secrets taken from the environment.

        overrides: change it, as `amend` says; a secret that they replace is not asked for.
        trust: run what it names, even if another user wrote it or it was changed.
        secrets_of: the blocks that are used; secrets of others stay hidden. None: all blocks.

        Raises RunFolderError: The folder is not trusted or has a link through which a run would
        write, a secret is not set, or config.json is not valid.
        """
        reject_links(self.path)
        content = self.config_bytes
        values = parse_json(self.path / "config.json", content)
        written = self._validate(values)
        if not trust:
            check_trust(
                self.path,
                written,
                digest=digest_of_bytes(content),
                recorded_digest=self.record.config_digest,
                recorded_paths=self.record.local_code,
                signature=self.record.signature,
            )
        config = amend(written, overrides) if overrides else written
        return self.with_template_time(self._validate(restore_used(config, secrets_of)))

    def with_template_time(self, config: RunConfig) -> RunConfig:
        """Return the run's configuration with the time that its chat template reads.

        The time is the same in all processes that ever render a prompt of this run.
        """
        if config.model.template_time is not None:
            return config
        time = self.record.created.replace(tzinfo=None).isoformat(timespec="seconds")
        model = config.model.model_copy(update={"template_time": time})
        return config.model_copy(update={"model": model})

    @property
    def written_config(self) -> RunConfig:
        """The configuration to read, not to run: secrets stay hidden."""
        return self._validate(parse_json(self.path / "config.json", self.config_bytes))

    @property
    def config_bytes(self) -> bytes:
        """The content of config.json, also if the last attempt was killed before it wrote that."""
        return described_config(self.path, self.record)

    @property
    def status(self) -> str:
        """The record's status, or `died` if the process of a running run is gone."""
        died = self.record.status == "running" and not self.record.process.alive
        return "died" if died else self.record.status

    @property
    def duration_s(self) -> float:
        """The duration of all attempts; an unfinished one counts to now, or to its last trace."""
        now = self._last_sign_of_life() if self.status == "died" else datetime.now(UTC)
        spent = [((attempt.ended or now) - attempt.started) for attempt in self.attempts]
        return sum(each.total_seconds() for each in spent)

    @property
    def attempts(self) -> list[AttemptRecord]:
        return self.record.attempts

    @property
    def overrides(self) -> list[str]:
        """The overrides that the run was started with; [] if they cannot be read."""
        try:
            return read_bytes(self.path / "overrides.txt").decode().splitlines()
        except (RunFolderError, UnicodeDecodeError):
            return []

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def verdicts(self) -> Path:
        """The folder of a judge's answers; it exists if the run has a judge."""
        return self.path / "judge"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempts[-1].number}"

    @property
    def error_text(self) -> Path:
        """The file of the current attempt's error, if that is too long for the record."""
        return self.logs / "error.txt"

    def lineage(
        self,
        kind: LineageKind,
        checkpoint: str | None = None,
        changed: Mapping[str, list[JsonValue]] | None = None,
    ) -> Lineage:
        """Describe this run in the record of a run that is made from it."""
        return Lineage(
            kind=kind,
            run=self.record.id,
            path=str(self.path.resolve()),
            checkpoint=checkpoint,
            changed=dict(changed or {}),
        )

    def checkpoints(self) -> list[Path]:
        """List all complete checkpoints, the oldest first."""
        return all_checkpoints(self.path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run against others, in this process or another, while the block runs.

        May be entered again within the block.

        Raises RunFolderError if somebody else holds the lock.
        """
        if self._is_held:
            yield
            return
        with locked(self.path):
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    def adopt(self) -> None:
        """Make this process the run's own; another process created the folder for it."""
        self._write_record(process=ProcessId.of_this_process())

    def update(self, **facts: JsonValue) -> None:
        """Add to the record's facts, replacing those of equal name."""
        self._write_record(facts={**self.record.facts, **facts})

    def begin_attempt(
        self,
        config: RunConfig,
        *,
        command: Sequence[str],
        checkpoint: str | None,
        changed: Mapping[str, list[JsonValue]],
        differences: Sequence[str],
    ) -> None:
        """Start one more attempt by this process, which holds the lock.

        The previous configuration is kept with the logs of the previous attempt, and the new one
        with those of this attempt. A kill at any instant leaves a folder that resumes.

        Raises RunFolderError if a folder in the run folder is missing and cannot be made again.
        """
        last, content = self.attempts[-1], self.config_bytes
        make_subfolders(self.path)
        secrets = known_secrets(config.model_dump(mode="json"))
        written = current = self.path / "config.json"
        if read_bytes(current) != content:
            write_bytes(current, content)
        if last.ended is None:
            end = {"ended": self._last_sign_of_life(), "status": "died"}
            last = last.model_copy(update=end)
        number = open_logs(self.path / "logs", after=last.number)
        if changed:
            self.logs.mkdir(exist_ok=True)
            write_bytes(self.logs / "config.json", content)
            written = self.path / "logs" / f"attempt_{number}" / "config.json"
            write_config(written, config.model_dump(mode="json"), secrets)
        attempt = AttemptRecord(
            number=number,
            command=[hide_assignments(word, secrets) for word in command],
            started=datetime.now(UTC),
            ended=None,
            status="running",
            cause=None,
            checkpoint=checkpoint,
            changed=hide_in_config(changed, secrets),
            differences=list(differences),
        )
        self._write_record(
            status="running",
            cause=None,
            ended=None,
            process=ProcessId.of_this_process(),
            **signed(written, config),
            attempts=[*self.attempts[:-1], last, attempt],
        )
        # Until here a kill changes nothing; from here on, `config_bytes` is the new content.
        if changed:
            write_bytes(current, written.read_bytes())

    def add_differences(self, found: Sequence[str]) -> None:
        """Add differences from the last attempt that the current one finds after its start."""
        last = self.attempts[-1]
        last = last.model_copy(update={"differences": [*last.differences, *found]})
        self._write_record(attempts=[*self.attempts[:-1], last])

    def finish(self, status: EndStatus, cause: str | None = None) -> None:
        """Close the record. cause: why the run ended; a long one is written to a file."""
        if cause is not None and len(cause) > MAX_LENGTH:
            write_text(self.error_text, cause)
            cause = for_people(cause, whole=self.error_text.relative_to(self.path))
        elif cause is not None:
            cause = for_people(cause)
        end = {"status": status, "cause": cause, "ended": datetime.now(UTC)}
        attempts = [*self.attempts[:-1], self.attempts[-1].model_copy(update=end)]
        self._write_record(**end, attempts=attempts)
        # Evaluations and reproductions are the latest only where nothing was trained.
        latest = self.path.parent / "latest"
        if status == "finished" and not self.record.is_training and not _is_training(latest):
            point_symlink(latest, self.path.name)

    def _write_record(self, **changes: Any) -> None:
        record = RunRecord.model_validate({**dict(self.record), **changes})
        write_json(self.path / "run.json", record.model_dump(mode="json"))
        self.record = record

    def _validate(self, values: Any) -> RunConfig:
        if not isinstance(values, dict):
            raise RunFolderError(
                f"{self.path / 'config.json'} holds {values!r:.80}; expected keys and values"
            )
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            raise RunFolderError(
                f"{self.path / 'config.json'} does not fit openenv-pipe {__version__} "
                f"(openenv-pipe {self.record.version} wrote it): "
                f"{explain_validation(error, RunConfig)}"
            ) from error

    def _last_sign_of_life(self) -> datetime:
        files = [file for file in (self.metrics_path, self.path / "run.json") if file.exists()]
        return datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC)


def _is_training(path: Path) -> bool:
    try:
        return RunFolder.open(path).record.is_training
    except RunFolderError:
        return False


def _read_record(path: Path) -> RunRecord:
    values = read_json(path / "run.json")
    versions = values.get("versions") if isinstance(values, dict) else None
    if isinstance(versions, dict) and values.get("format") != FORMAT:
        found, writer = repr(values.get("format")), str(versions.get("openenv-pipe"))
        raise RunFolderError(
            f"{path / 'run.json'} has format={for_people(found)}, written by openenv-pipe "
            f"{for_people(writer)}; openenv-pipe {__version__} reads format={FORMAT}; use the "
            "version that wrote the folder"
        )
    try:
        return RunRecord.model_validate(values)
    except ValidationError as error:
        raise RunFolderError(f"{path / 'run.json'} is damaged: {first_problem(error)}") from error
