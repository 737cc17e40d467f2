"""Plugins: installed packages that bring configuration and environments of their own.

A plugin names its package under the entry point group `openenv_pipe.plugins`. The folders `conf/`
and `envs/` of that package join the search path. The package is found without being imported. If it
has a module `extra`, which registers types of blocks, that is imported with the configuration.
"""

import functools
import importlib.util
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from openenv_pipe.core import BASES
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import BlockType, Extra, load, plugin_problems

ENTRY_POINTS = "openenv_pipe.plugins"
FOLDERS = ("conf", "envs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point of an installed package."""

    name: str
    package: str
    distribution: str  # the installed package, as pip names it
    version: str
    folder: Path | None  # with conf/, envs/ or both; None: the search path leaves the plugin out
    problem: str = ""  # why it cannot be used

    def __str__(self) -> str:
        return f"the plugin {self.name!r} ({self.distribution} {self.version})"


def find_plugins() -> tuple[Plugin, ...]:
    """Find the installed plugins, sorted by name. None of them is imported."""
    return _find_plugins(tuple(sys.path))


def check_plugins() -> tuple[Plugin, ...]:
    """Find the installed plugins, whose `problem` also says what is wrong with registered types."""
    problems = plugin_problems()
    return tuple(
        replace(plugin, problem=plugin.problem or problems.get(plugin, ""))
        for plugin in find_plugins()
    )


def plugin_dirs(name: str) -> list[Path]:
    """The folders of this name, `conf` or `envs`, of all plugins, sorted by the plugins' names."""
    folders = [plugin.folder / name for plugin in find_plugins() if plugin.folder is not None]
    return [folder for folder in folders if folder.is_dir()]


def register_types(types: dict[str, dict[str, BlockType]]) -> dict[Plugin, str]:
    """Add the types of blocks that plugins register by the constant EXTRA of a module `extra`.

    types: by block and name.
    Returns why plugins cannot be used.
    """
    problems = {}
    for plugin in find_plugins():
        if plugin.folder is None or not (plugin.folder / "extra.py").is_file():
            continue
        where = file = str(plugin.folder / "extra.py")
        try:
            for entry in _entries(plugin):
                where = f"{file}: {entry.block}.type={entry.type}"
                check_type(entry)
                if taken := types[entry.block].get(entry.type):
                    raise ConfigError(
                        f"{taken.build} is registered under this name; expected a name that no "
                        f"other type of {entry.block} has"
                    )
                types[entry.block][entry.type] = entry
        except ConfigError as error:
            problems[plugin] = f"{where}: {error}; fix or uninstall the plugin"
    return problems


def _entries(plugin: Plugin) -> tuple[BlockType, ...]:
    extra = load(f"{plugin.package}.extra:EXTRA")
    if not isinstance(extra, Extra) or extra != Extra(name=extra.name, blocks=extra.blocks):
        raise ConfigError(
            f"EXTRA is {extra!r:.200}; expected an openenv_pipe.registry.Extra with `name` and "
            "`blocks` alone"
        )
    if not isinstance(extra.blocks, tuple) or not all(map(_is_entry, extra.blocks)):
        raise ConfigError(
            f"`blocks` of EXTRA is {extra.blocks!r:.200}; expected a tuple of "
            "openenv_pipe.registry.BlockType, whose values are texts"
        )
    return extra.blocks


def _is_entry(entry: object) -> bool:
    return isinstance(entry, BlockType) and all(isinstance(v, str) for v in asdict(entry).values())


def check_type(entry: BlockType) -> None:
    """Check a registered type. Its class is imported; its other targets are not.

    Raises ConfigError: the block, the class or a module does not exist, or they do not go together.
    """
    from openenv_pipe.system.user_code import named  # takes long, and few have plugins

    if entry.block not in BASES:
        raise ConfigError(f"there is no block {entry.block!r}; expected one of {', '.join(BASES)}")
    base = BASES[entry.block]
    if entry.config and not base:
        raise ConfigError(f"config={entry.config!r}: this block has no keys; expected no class")
    targets = {"build": entry.build}
    targets |= {"config": entry.config} if base else {}
    optional = {"check": entry.check, "trial": entry.trial}
    targets |= {key: target for key, target in optional.items() if target}
    for key, target in targets.items():
        module, _, name = target.partition(":")
        with named(f"{key}={target!r}"):
            is_found = bool(module and name) and importlib.util.find_spec(module) is not None
        if not is_found:
            raise ConfigError(f"{key}={target!r}: there is no such module; expected module:name")
    if base:
        model = load(entry.config)
        is_block = isinstance(model, type) and issubclass(model, load(base))
        if not is_block:
            raise ConfigError(f"config={entry.config!r}: expected a subclass of {base}")
        annotation = model.model_fields["type"].annotation
        if get_args(annotation) != (entry.type,):
            raise ConfigError(
                f"config={entry.config!r}: its `type` is {annotation}; "
                f"expected Literal[{entry.type!r}]"
            )


def unusable_plugins_note() -> str:
    """Return text about unusable plugins, to be added to an error about something missing."""
    return "".join(
        f"; {plugin} cannot be used: {plugin.problem}"
        for plugin in find_plugins()
        if plugin.folder is None
    )


@functools.cache
def _find_plugins(search_path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Find the plugins on `sys.path`, an argument so that a changed path is searched again."""
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
