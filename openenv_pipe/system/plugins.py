"""Plugins: installed packages that bring configuration and environments of their own.

A plugin names its package under the entry point group `openenv_pipe.plugins`. The folders `conf/`
and `envs/` of that package join the search path. The package is found without being imported. If it
has a module `extra`, which registers types of blocks, that is imported with the configuration.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import BlockType, Extra

ENTRY_POINTS = "openenv_pipe.plugins"
FOLDERS = ("conf", "envs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point of an installed package."""

    name: str
    package: str
    distribution: str  # the installed package, as pip names it
    version: str
    folder: Path | None  # with conf/, envs/ or both; None: the plugin cannot be used
    problem: str = ""  # why it cannot be used


def find_plugins() -> tuple[Plugin, ...]:
    """Find the installed plugins, sorted by name."""
    return _find_plugins(tuple(sys.path))


def plugin_dirs(name: str) -> list[Path]:
    """The folders of this name, `conf` or `envs`, of all plugins, sorted by the plugins' names."""
    folders = [plugin.folder / name for plugin in find_plugins() if plugin.folder is not None]
    return [folder for folder in folders if folder.is_dir()]


def plugin_blocks() -> list[BlockType]:
    """Return the types of blocks that plugins register by the constant EXTRA of a module `extra`.

    Raises:
        ConfigError: the module cannot be imported, or its EXTRA is not one of blocks only.
    """
    found: list[BlockType] = []
    for plugin in find_plugins():
        if plugin.folder is None or not (plugin.folder / "extra.py").is_file():
            continue
        where = f"the plugin {plugin.name!r} ({plugin.distribution} {plugin.version})"
        try:
            extra = importlib.import_module(f"{plugin.package}.extra").EXTRA
        except Exception as error:  # whatever the plugin's code raises
            raise ConfigError(
                f"{where}: {plugin.folder / 'extra.py'} cannot be used: "
                f"{type(error).__name__}: {error}; mend or uninstall it"
            ) from error
        if not isinstance(extra, Extra) or extra != Extra(name=extra.name, blocks=extra.blocks):
            raise ConfigError(
                f"{where}: EXTRA in {plugin.folder / 'extra.py'} is {extra!r:.200}; expected an "
                "openenv_pipe.registry.Extra with `name` and `blocks` alone"
            )
        found += extra.blocks
    return found


def unusable_plugins_note() -> str:
    """Return text about unusable plugins, to be added to an error about something missing."""
    return "".join(
        f"; the plugin {plugin.name!r} ({plugin.distribution} {plugin.version}) cannot be used: "
        f"{plugin.problem}"
        for plugin in find_plugins()
        if plugin.folder is None
    )


@functools.cache
def _find_plugins(search_path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """The plugins of `sys.path`, which is the argument so that a longer one is searched again."""
    from importlib.metadata import entry_points  # not needed for `--help`

    found = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        folder, problem = _usable_folder(entry.value)
        distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
        found.append(
            Plugin(
                name=entry.name,
                package=entry.value,
                distribution=distribution,
                version=version,
                folder=folder,
                problem=problem,
            )
        )
    return tuple(found)


def _usable_folder(package: str) -> tuple[Path | None, str]:
    """The folder of an importable package, or None and why it cannot be used."""
    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)  # of the top level: parents are not imported for it
    except (ImportError, ValueError) as error:
        return None, f"{package!r} cannot be found: {error}"
    parents = spec.submodule_search_locations if spec is not None else None
    folders = [Path(parent, *rest) for parent in parents or ()]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        return None, f"there is no package {package!r}"
    if not any((folder / name).is_dir() for name in FOLDERS):
        return None, f"{folder} has neither conf/ nor envs/"
    if (folder / "conf" / "config.yaml").exists():
        return None, f"{folder}/conf/config.yaml would replace the one that every run starts from"
    return folder, ""
