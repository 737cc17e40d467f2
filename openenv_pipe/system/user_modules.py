"""Import the user's modules anew where a process, such as a notebook's, outlives their edits."""

import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.resources import PACKAGE_DIR, shipped_dir

_lock = threading.Lock()
_num_open = 0  # works that use modules
_known: dict[Path, str] = {}  # the sha256 of each file at the beginning of the last work


@contextmanager
def current_modules() -> Iterator[None]:
    """Do work with the user's modules as they are when it begins.

    If one of them has changed, all of them are forgotten, because they may have names of each
    other, and `load_callable` imports them anew. Objects that the user has of them stay as they
    are. Work that begins while other work is open shares the modules of that.
    """
    global _num_open
    with _lock:
        if not _num_open:
            _forget_changed_modules()
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1


def _forget_changed_modules() -> None:
    own = _own_modules()
    digests = {file: digest_of_file(file) if file.is_file() else "" for file in own.values()}
    if any(_has_changed(file, digest) for file, digest in digests.items()):
        packages = {name.partition(".")[0] for name in own}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        for file in digests:
            # Python tells versions apart by their size and whole seconds.
            with suppress(OSError):
                Path(importlib.util.cache_from_source(str(file))).unlink()
    _known.update(digests)
    importlib.invalidate_caches()


def _own_modules() -> dict[str, Path]:
    """Return the files of imported modules below the current folder that no package installs."""
    current = Path.cwd()
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    others = (*installed, PACKAGE_DIR, shipped_dir("envs"))
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name != "__main__" and file.startswith(str(current)):
            path = Path(file)
            if path.suffix == ".py" and not any(path.is_relative_to(each) for each in others):
                found[name] = path
    return found


def _has_changed(file: Path, digest: str) -> bool:
    """Return whether a file is another one than at the last work, or may be than when imported."""
    if file in _known:
        return _known[file] != digest
    return not digest or file.stat().st_mtime > psutil.Process().create_time()
