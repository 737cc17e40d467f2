"""The user's own key, by which files that this user wrote are recognised later.

It is made at its first use, in the user's state folder (`XDG_STATE_HOME`, by default
`~/.local/state`), readable by nobody else.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

NUM_BYTES = 32


class NoKeyError(Exception):
    """The key cannot be kept here, or others may know it. The text says why."""


def key_path() -> Path:
    """Return where the key is kept. Raises NoKeyError if the user has no home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        # A relative folder would let the current folder provide a key.
        folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise NoKeyError(f"{error}; set XDG_STATE_HOME to a folder of your own") from None
    return folder / "openenv-pipe" / "key"


def sign(text: str) -> str:
    """Return the HMAC-SHA256 of a text by the user's key, in hex. Raises NoKeyError."""
    return hmac.new(_key(), text.encode(), hashlib.sha256).hexdigest()


def is_signed(text: str, signature: str) -> bool:
    """True if the signature is what `sign` returns for the text. Raises NoKeyError."""
    return hmac.compare_digest(sign(text).encode(), signature.encode(errors="replace"))


def _key() -> bytes:
    path = key_path()
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(NUM_BYTES + 1)
    except OSError as error:
        raise NoKeyError(
            f"the key {path} cannot be kept: {error.strerror}; set XDG_STATE_HOME to a "
            "writable folder of your own"
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NoKeyError(
            f"others may know the key {path}; remove it, or set XDG_STATE_HOME to a folder that "
            "only you can read"
        )
    if len(key) != NUM_BYTES:
        raise NoKeyError(f"the key {path} is damaged; remove it")
    return key


def _make(path: Path) -> None:
    """Write a new key beside its place and link it there, so that it is complete or absent."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".key.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # Another process has made the key meanwhile.
            os.link(aside, path)
    finally:
        aside.unlink()
