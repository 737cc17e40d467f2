"""The user's modules: find them, and import them anew when they change during the process."""

import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.resources import PACKAGE_DIR, env_dirs

_lock = threading.Lock()
_num_open = 0  # blocks that use modules
_known: dict[Path, str] = {}  # the sha256 of each file at the beginning of the last block


@contextmanager
def current_modules() -> Iterator[None]:
    """Run the block with the user's modules as they are when it begins.

    If one of them has changed, all of them are forgotten, because they may have imported names from
    each other, and `load_callable` imports them anew. Objects made from the old ones stay as they
    are. A block that begins while another is open shares the modules of that.
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


def users_modules() -> dict[str, Path]:
    """Return the imported modules that no package installs, and those of environments, by name.

    Each has its file, or its folder if it is a folder without an `__init__.py`.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = (*(Path(sysconfig.get_path(name)) for name in names), PACKAGE_DIR)
    own, found = env_dirs(), {}
    for name, module in list(sys.modules.items()):
        # Asking a lazy module itself would import it, and not all of them can be imported.
        facts = getattr(module, "__dict__", {})
        text = facts.get("__file__") or next(iter(facts.get("__path__") or ()), None)
        if isinstance(text, str) and Path(text).is_absolute() and name != "__main__":
            place = Path(text)
            if _is_below(place, own) or not _is_below(place, installed):
                found[name] = place
    return found


def _is_below(place: Path, folders: Iterable[Path]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def _forget_changed_modules() -> None:
    current = [Path.cwd()]
    own = {name: place for name, place in users_modules().items() if _is_below(place, current)}
    files = [place for place in own.values() if place.suffix == ".py"]
    digests = {file: digest_of_file(file) if file.is_file() else "" for file in files}
    if any(_has_changed(file, digest) for file, digest in digests.items()):
        for name in own:
            del sys.modules[name]
        for file in files:
            # Python tells versions of a file apart only by its size and the second of its change.
            with suppress(OSError):
                Path(importlib.util.cache_from_source(str(file))).unlink()
    _known.update(digests)
    importlib.invalidate_caches()


def _has_changed(file: Path, digest: str) -> bool:
    """Return whether a file has changed since the last block, or may have since its import."""
    if file in _known:
        return _known[file] != digest
    return not digest or file.stat().st_mtime > psutil.Process().create_time()
