"""Find out where a run comes from: code, packages and machine.

Every query has a time limit and none can fail a run: what cannot be found out is None or left out.
Environment variables are not recorded.
"""

import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
from pydantic import BaseModel, ConfigDict, FailFast

from openenv_pipe import __version__
from openenv_pipe.system.child_environment import child_environment
from openenv_pipe.system.files import digest_of_bytes, digest_of_file
from openenv_pipe.system.process import cpu_model

PACKAGES = (
    "openenv", "openenv-core", "torch", "transformers", "peft", "accelerate",
    "safetensors", "tokenizers", "numpy", "pydantic", "hydra-core", "omegaconf", "websockets",
)  # fmt: skip
TOOL_FOLDER = Path(__file__).resolve().parents[1]
LOOK_TIMEOUT_S = 5.0

# The first wrong text ends the check: a file may have half a million.
Texts = Annotated[list[str], FailFast()]


class Record(BaseModel):
    """Base of the parts of run.json: frozen; keys of a newer version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Checkout(Record):
    """One git checkout. `diff_digest` is the sha256 of `git diff HEAD`, None without changes.

    Untracked files count only in the code of the run: this program's, and what the run loads.
    """

    folder: str
    sha: str | None
    dirty: bool
    diff_digest: str | None
    num_untracked: int


class Machine(Record):
    host: str
    platform: str
    cpu: str
    num_cpus: int
    memory_mb: int
    gpus: Texts


class Diff(NamedTuple):
    """A checkout and the text of its uncommitted changes."""

    checkout: Checkout
    text: str


def find_checkouts(code: Sequence[str]) -> list[Diff]:
    """Return the git checkouts of the tool's code and of the working directory, each once.

    code: files and folders with code that the run loads besides the tool's.
    """
    found = []
    if _git(TOOL_FOLDER, "ls-files", "--error-unmatch", "errors.py") is not None:
        found.append(_toplevel(TOOL_FOLDER))  # An installed tool may lie in another checkout.
    found.append(_toplevel(Path.cwd()))
    paths = [TOOL_FOLDER, *map(Path, code)]
    return [_look_at_checkout(each, paths) for each in dict.fromkeys(found) if each is not None]


def find_code_digest() -> str:
    """Return the sha256 over this tool's Python files, independent of git."""
    digest = hashlib.sha256()
    for file in sorted(TOOL_FOLDER.rglob("*.py")):
        name = file.relative_to(TOOL_FOLDER).as_posix()
        if not name.startswith(("conf/", "envs/")):  # parts of a wheel with their own digests
            digest.update(f"{name}\0{digest_of_file(file)}\n".encode())
    return digest.hexdigest()


def find_versions() -> dict[str, str]:
    """Return the versions of this tool, Python, and packages that affect a run's numbers."""
    versions = {"openenv-pipe": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_machine() -> Machine:
    """Describe this machine, as Python and nvidia-smi see it."""
    return Machine(
        host=socket.gethostname(),
        platform=platform.platform(),
        cpu=cpu_model(),
        num_cpus=os.cpu_count() or 1,
        memory_mb=psutil.virtual_memory().total // 2**20,
        gpus=_gpu_names(),
    )


def _gpu_names() -> list[str]:
    answer = _answer(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return [line.strip() for line in (answer or "").splitlines() if line.strip()]


def _toplevel(folder: Path) -> Path | None:
    answer = _git(folder, "rev-parse", "--show-toplevel")
    return Path(answer.strip()) if answer else None


def _look_at_checkout(folder: Path, code: Sequence[Path]) -> Diff:
    sha = _git(folder, "rev-parse", "--verify", "HEAD")
    diff = (_git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or "") if sha else ""
    inside = [str(path) for path in code if path.resolve().is_relative_to(folder.resolve())]
    listing = ("ls-files", "--others", "--exclude-standard", "--", *inside)
    untracked = (_git(folder, *listing) or "") if inside else ""
    checkout = Checkout(
        folder=str(folder),
        sha=sha.strip() if sha else None,
        dirty=bool(diff or untracked),
        diff_digest=digest_of_bytes(diff.encode(errors="replace")) if diff else None,
        num_untracked=len(untracked.splitlines()),
    )
    return Diff(checkout, diff)


def _git(folder: Path, *arguments: str) -> str | None:
    return _answer(["git", "-C", str(folder), "--no-optional-locks", *arguments])


def _answer(command: list[str]) -> str | None:
    """Return what a command prints; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            timeout=LOOK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
