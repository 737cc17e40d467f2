"""Atomic file writes, and digests of files. A file written here is complete or absent."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.system.budgets import (
    MAX_FILE_MB,
    RECORD,
    Account,
    JsonBudget,
    check_shape,
    too_large,
)
from openenv_pipe.system.secrets import redact

# How safetensors ends its message about an error of the operating system.
NATIVE_ERROR = re.compile(r"\(os error (\d+)\)")
# A file of a run folder is at most this deep in it: checkpoints/NAME/resume/FILE.
DEEPEST = 6
# Socket paths have up to 107 bytes (Linux) or 103 (macOS), and ours up to 40 below TMPDIR.
LONGEST_SOCKET_PARENT = 60


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically: written beside it, synced, then renamed."""
    aside = name_beside(path)
    try:
        with naming(path), aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def name_beside(path: Path) -> Path:
    """Return a hidden, random name beside `path`, for what is renamed to it when it is complete.

    What is made there gets its mode from the user's umask; `tempfile` would keep others out.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError in the block name `path`: that of a full disk names no file by itself.

    safetensors raises an error of its own instead, which becomes an OSError here.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        is_native = type(error).__name__ == "SafetensorError"
        if not is_native or (found := NATIVE_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, without secrets.

    A lone surrogate is escaped as \\udc80, as JSON reads it.
    """
    write_bytes(path, redact(text).encode(errors="backslashreplace"))


def write_json(path: Path, value: Any, *, sort_keys: bool = True) -> None:
    """Write indented JSON with a final newline atomically."""
    write_text(path, dump_json(value, sort_keys=sort_keys))


def dump_json(value: Any, *, sort_keys: bool = True) -> str:
    """Return the JSON form of small files, in which equal values have equal bytes."""
    return json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n"


def read_bytes(path: Path, max_mb: int = MAX_FILE_MB) -> bytes:
    """Read a file of a run folder. Raises RunFolderError as `open_file`, or if it is too large."""
    with open_file(path) as file:
        try:
            content = file.read(max_mb * 2**20 + 1)
        except OSError as error:
            raise RunFolderError(f"cannot read {path}: {error}") from error
    if len(content) > max_mb * 2**20:
        raise too_large(path, max_mb)
    return content


def copy_file(path: Path, to: Path) -> None:
    """Copy a file of a run folder that has been checked. Raises RunFolderError as `open_file`."""
    with open_file(path) as file, to.open("xb") as copy:
        shutil.copyfileobj(file, copy)
    sync(to)


def open_file(path: Path) -> BinaryIO:
    """Open a file of a run folder to read it, also one that grows.

    Raises RunFolderError: It is missing, not a regular file, or not readable; or a part of its path
    below the run folder is a link.
    """
    try:
        # Opening a pipe would block without O_NONBLOCK, which means nothing for a file.
        descriptor = _open_below(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RunFolderError(f"cannot read {path}: it is not a file")
        return os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as error:
        is_link = isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR)
        what = "a part of its path is a link, or no folder: " if is_link else ""
        raise RunFolderError(f"cannot read {path}: {what}{error}") from error


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder of a run folder; [] if it is missing, or behind a link.

    A folder that somebody else made may have links to private files, whose names are private too.
    """
    try:
        descriptor = _open_below(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError):
        return []
    try:
        return sorted(os.listdir(descriptor))  # noqa: PTH208 - pathlib takes no descriptor
    finally:
        os.close(descriptor)


def reject_links(folder: Path) -> None:
    """Raise RunFolderError if a run folder has a link, which would lead writes elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise RunFolderError(
                f"{path} is a link, and a run writes to nothing outside of its folder; put what it "
                "leads to in its place, or remove it"
            )


def _open_below(path: Path, flags: int) -> int:
    """Open a file or folder without following links below its run folder. Raises OSError."""
    ancestors = [path, *path.parents][:DEEPEST]
    root = next((each for each in reversed(ancestors) if _is_run_folder(each)), path.parent)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    parts = path.relative_to(root).parts
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        return os.open(parts[-1] if parts else ".", flags | os.O_NOFOLLOW, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _is_run_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in ("run.json", "sweep.json"))


def read_json(path: Path, budget: JsonBudget = RECORD) -> Any:
    """Read a JSON file. Raises RunFolderError if it is missing, damaged, or beyond the budget."""
    return parse_json(path, read_bytes(path, budget.max_mb), budget)


def parse_json(where: Path | str, content: bytes, budget: JsonBudget = RECORD) -> Any:
    """Parse the content of a file or of a line. Raises RunFolderError as `read_json`.

    where: the file, or the file and the line, for errors
    """
    Account(budget).spend(where, content)
    try:
        value = json.loads(content.decode())
        if isinstance(value, dict | list):
            check_shape(value, budget.max_keys)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {where}: {error}") from error
    return value


@contextmanager
def new_folder(target: Path, option: str) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `target` at the end of the block.

    It is beside `target`, which does not exist or is empty, so `target` is complete or absent.

    Args:
        option: the option that names `target`, for the error message.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = name_beside(target)
        aside.mkdir()
    except OSError as error:
        raise ConfigError(f"{option} {target} cannot be written: {error}") from error
    try:
        yield aside
        sync_tree(aside)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def socket_folder(prefix: str) -> Path:
    """Make a folder for unix sockets, which only this user can enter.

    It is in TMPDIR, unless the kernel would reject sockets there because their paths are too long.
    """
    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_SOCKET_PARENT
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp" if is_long else None))


def cache_folder() -> Path:
    """Return this user's cache folder, whether it exists or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "openenv-pipe"


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path | None]:
    """Yield an empty folder in `parent` that is removed at the end of the block.

    `parent` is made, and is removed too if it was not there and is empty. None: it cannot be made.
    """
    made = next((path for path in (*reversed(parent.parents), parent) if not path.exists()), None)
    folder = None
    with suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        path = parent
        while made is not None and path.is_relative_to(made):
            with suppress(OSError):  # something else has been written there meanwhile
                path.rmdir()
            path = path.parent


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make all files and folders below `path` survive a power failure."""
    for item in [path, *path.rglob("*")]:
        sync(item)


def point_symlink(link: Path, target: str) -> None:
    """Make `link` point to `target` atomically; anything there that is not a link is left alone."""
    if link.exists() and not link.is_symlink():
        return
    aside = link.parent / f".{link.name}.{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)


def stamp_of(file: Path | os.DirEntry[str]) -> tuple[int, int, int]:
    """Return what changes when a file is replaced: size, time of change, inode. Raises OSError."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def digest_of_bytes(data: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the sha256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
