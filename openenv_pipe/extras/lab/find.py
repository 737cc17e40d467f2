"""`env find`: the environments that are installed, and those that a catalog of OpenEnv names."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import conf_dirs, env_dirs, group_options, short_path
from openenv_pipe.system.tables import Column, Fit, Table

MANIFEST = "openenv.yaml"
# In the record of an installed distribution: the manifest of a package at the top.
INSTALLED = re.compile(rf"^([\w.-]+)/{re.escape(MANIFEST)},", re.MULTILINE)
MAX_ENTRIES = 1000  # of a catalog, the most that OpenEnv's search returns


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundEnvironment:
    name: str
    description: str
    use: str


def find_environments(word: str, catalog: Path | None) -> list[FoundEnvironment]:
    """Return the environments whose name or description has `word`, in any case.

    They are packages of `envs/` folders, of the current folder and of installed distributions, then
    the entries of `catalog`, which `openenv catalog build` has written. No environment is imported.

    Raises ConfigError: the catalog cannot be read.
    """
    word = word.casefold()
    installed = [
        each for each in _packages() if word in f"{each.name} {each.description}".casefold()
    ]
    return installed + ([] if catalog is None else _entries(word, catalog))


def environments_table(found: list[FoundEnvironment]) -> Table:
    table = Table(
        Column("environment"), Column("what it is", fit=Fit.FOLD), Column("use", fit=Fit.FOLD)
    )
    for each in found:
        table.add_row(each.name, each.description, each.use)
    return table


def _packages() -> Iterator[FoundEnvironment]:
    blocks = _blocks()
    for folder in _unique(env_dirs(), f"*/{MANIFEST}"):
        block = blocks.get(folder.name)
        use = f"env={block}" if block else f"env.package={folder.name}"
        yield _described(folder, use)
    for folder in _unique([Path.cwd()], MANIFEST, f"*/{MANIFEST}"):
        path = short_path(folder)
        yield _described(folder, f"env.package=./{path}" if path != "." else "env.package=.")
    for distribution in distributions():
        for name in INSTALLED.findall(distribution.read_text("RECORD") or ""):
            folder = Path(str(distribution.locate_file(name)))
            yield _described(folder, f"env.package={folder}")


def _unique(folders: list[Path], *patterns: str) -> list[Path]:
    """Return the folders of manifests; of equal names only the first, as `find_env` does."""
    found: dict[str, Path] = {}
    for folder in folders:
        for manifest in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            found.setdefault(manifest.parent.name, manifest.parent)
    return [found[name] for name in sorted(found)]


def _blocks() -> dict[str, str]:
    """Map packages to the blocks `env=NAME` that start them; a block of the same name wins."""
    found: dict[str, str] = {}
    for name in group_options("env"):
        files = (folder / f"env/{name}.yaml" for folder in conf_dirs())
        package = _read(next(file for file in files if file.exists())).get("package")
        if isinstance(package, str) and (name == package or package not in found):
            found[package] = name
    return found


def _described(folder: Path, use: str) -> FoundEnvironment:
    manifest, project = _read(folder / MANIFEST), _read(folder / "pyproject.toml").get("project")
    described = [manifest, project if isinstance(project, dict) else {}]
    texts = [text for each in described if isinstance(text := each.get("description"), str)]
    description = texts[0] if texts else "its package does not say"
    return FoundEnvironment(name=folder.resolve().name, description=description, use=use)


def _read(file: Path) -> dict[str, Any]:
    """Read a YAML or TOML file; a missing or broken one gives an empty mapping."""
    try:
        text = file.read_text()
        read = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}


def _entries(word: str, catalog: Path) -> list[FoundEnvironment]:
    from openenv.discovery import CatalogError, load_catalog, search_catalog

    try:
        matches = search_catalog(load_catalog(catalog), word, limit=MAX_ENTRIES)
    except CatalogError as error:
        raise ConfigError(
            f"--catalog {catalog}: {error}; expected a file that `openenv catalog build` writes"
        ) from None
    found = []
    for match in matches:
        source = match.entry.data.source
        clone = Path(source.uri).stem
        found.append(
            FoundEnvironment(
                name=match.entry.data.name,
                description=match.entry.data.description,
                use=f"git clone {source.uri}, then env.package=./{clone}/{source.path}",
            )
        )
    return found
