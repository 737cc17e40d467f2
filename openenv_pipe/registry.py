"""What the extras bring, as the constant `EXTRA` of each folder of `openenv_pipe/extras/` says.

An extra names its parts as "module:name", so no part is imported before it is used.
"""

import pkgutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from openenv_pipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `openenv-pipe`.

    The command line imports the target's module whenever it starts, so that module imports slow
    modules inside its functions.
    """

    name: str
    target: str  # "module:name" of a function, or of a typer.Typer with several commands


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockType:
    """A type of a block of the configuration.

    The arguments of `build` and `check` depend on the block: see the function that builds its
    part, such as `trackers.build.build_tracker`.
    """

    block: str  # its key, such as "host"
    type: str  # what the key `type` of the block has to be, such as "docker"
    # "module:name" of its class, whose module imports no more than the schema does; empty for a
    # key whose value is the name of a type, such as engine.launch.
    config: str
    build: str  # "module:name" of what makes the part that the block configures
    check: str = ""  # "module:name" of what a run calls before it begins, if there is any
    trial: str = ""  # "module:name" of what `openenv-pipe check` tries beyond that
    open: str = ""  # "module:name" of what opens a term of the reward that has to be closed


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """What one extra brings. The hooks of type str are "module:name"; "" stands for none."""

    name: str  # that of its folder
    commands: tuple[Command, ...] = ()
    blocks: tuple[BlockType, ...] = ()
    functions: tuple[str, ...] = ()  # "module:name" of those for the Python API
    # A run awaits it before it has a folder, with its RunConfig and a function that shows a note.
    # It gets what takes minutes once and serves later runs.
    prepare: str = ""
    made_model: str = ""  # returns the `models.hub.MadeModel` of a HubModelConfig, or None
    report: str = ""  # writes the report of a `runs.folder.RunFolder`; returns its path
    # returns the learning curves of a `runs.folder.RunFolder` in any state as a PNG, or None
    curves: str = ""
    eval_page: str = ""  # returns the Markdown page of an evaluation: name, report and groups
    on_episodes: str = ""  # A run calls it with its folder and each new file of `episodes/`.
    devices: str = ""  # a subclass of `learner.devices.Devices`, for trainer.devices above 1
    multirun: str = ""  # `train -m` calls it with the options of `train`.
    fast_sampling: str = ""  # a subclass of `models.forward.row_forward.FastSampling`
    vision: str = ""  # a subclass of `models.vision.Vision`: vision-language models
    other_names: str = ""  # returns advice for an unknown key, from its name and value, or None
    rules: str = ""  # further rules of `config.rules`
    unused: str = ""  # further rules of `config.unused_keys`


@cache
def extras() -> tuple[Extra, ...]:
    """Return what each folder of `openenv_pipe/extras/` brings, sorted by name."""
    folder = import_module("openenv_pipe.extras")
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return tuple(import_module(f"{folder.__name__}.{name}").EXTRA for name in names)


def functions() -> dict[str, str]:
    """Map the name of each function that extras add to the Python API to its "module:name"."""
    return {each.partition(":")[2]: each for extra in extras() for each in extra.functions}


def if_command(name: str, text: str) -> str:
    """Return the text if an extra brings the command that it names, else ""."""
    return text if any(name == each.name for extra in extras() for each in extra.commands) else ""


def block_types(block: str) -> Mapping[str, BlockType]:
    """Return all types of a block by their names: of the core, of the extras, then of plugins.

    Raises ConfigError: plugins register types that cannot be used.
    """
    types, problems = _registered(tuple(sys.path))
    if problems:
        raise ConfigError(
            "; ".join(f"{plugin} cannot be used: {problem}" for plugin, problem in problems.items())
        )
    return types[block]


def plugin_problems() -> Mapping[Any, str]:
    """Return why types that plugins register cannot be used, by `system.plugins.Plugin`."""
    return _registered(tuple(sys.path))[1]


@cache
def _registered(
    search_path: tuple[str, ...],
) -> tuple[Mapping[str, Mapping[str, BlockType]], Mapping[Any, str]]:
    """Return all types by block and name, and the problems of plugins, for this `sys.path`."""
    types: dict[str, dict[str, BlockType]] = {
        block: {} for block in load("openenv_pipe.core:BASES")
    }
    for extra in (load("openenv_pipe.core:CORE"), *extras()):
        for each in extra.blocks:
            types[each.block][each.type] = each
    return types, load("openenv_pipe.system.plugins:register_types")(types)


def load(target: str) -> Any:
    """Import the object that "module:name" names.

    Raises:
        UserCodeError: importing a plugin's object raises something; the message names the target.
    """
    module, _, name = target.partition(":")
    is_own = module.startswith("openenv_pipe.")
    with nullcontext() if is_own else load("openenv_pipe.system.user_code:named")(target):
        return getattr(import_module(module), name)
