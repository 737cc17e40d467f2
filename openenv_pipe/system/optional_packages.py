"""Optional dependencies: how to install a package that only some features need."""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from openenv_pipe.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "openenv-pipe"
FOR_DEVELOPERS = ("dev", "docs")
DISTRIBUTIONS = {"pyspiel": "open_spiel"}  # of modules that have other names
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def how_to_install(package: str) -> str:
    """Return the command that installs a package, by the extra that brings it if there is one.

    package: its name on the index of packages, or that of its module.
    """
    package = DISTRIBUTIONS.get(package, package)
    extra = _extras().get(_normalized(package))
    if extra is None:
        return f"`pip install {package}`"
    if (CHECKOUT / "pyproject.toml").is_file():
        folder = "." if Path.cwd() == CHECKOUT else CHECKOUT
        return f"`pip install -e '{folder}[{extra}]'`"
    return f"`pip install '{DISTRIBUTION}[{extra}]'`"


@contextmanager
def needed_by(what: str, package: str, otherwise: str = "") -> Iterator[None]:
    """Turn a failed import of the package in the block into a ConfigError that says what needs it.

    otherwise: what can be done in place of installing it.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {package} ({error}); {how_to_install(package)}{otherwise}"
        ) from error


def reject_missing_requirements(folder: Path) -> None:
    """Check the requirements in a package's pyproject.toml that our extras can install.

    Others are not checked: environments also work with other releases than they name.

    Raises ConfigError: one is not installed.
    """
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        names = [NAME.match(line) for line in project.get("dependencies", [])]
    except (OSError, ValueError, AttributeError, TypeError):
        return  # The file is optional.
    for name in filter(None, names):
        if _normalized(name[0]) in _extras() and not _is_installed(name[0]):
            raise ConfigError(
                f"env.package={folder.name!r} needs the package {name[0]}, which is not installed; "
                f"{how_to_install(name[0])}, or set env.python to a Python that has it"
            )


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version  # not needed for `--help`

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


@functools.cache
def _extras() -> Mapping[str, str]:
    """Map the packages of all extras to the first extra that brings them."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a checkout that is not installed
        return {}
    found: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(rf"({NAME.pattern}).*\bextra == ['\"]([\w-]+)['\"]", line)
        if match and match[2] not in FOR_DEVELOPERS:
            found.setdefault(_normalized(match[1]), match[2])
    return found


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
