"""Find the YAML files of a configuration, and merge them, by Hydra.

Hydra is used as a library to find files, follow defaults lists and parse overrides. It never
changes the working directory, writes output folders or configures logging. Only this module and
those that parse overrides import it. Its loader is private: no public function gives the file that
each value is from, or lets a file be checked before it is read.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openenv_pipe.config.diff import flat
from openenv_pipe.config.resolvers import RESOLVERS
from openenv_pipe.config.yaml_files import EXPERIMENTS, Origins, check_file, find_file
from openenv_pipe.errors import ConfigError
from openenv_pipe.system import resources
from openenv_pipe.system.untrusted_text import visible

if TYPE_CHECKING:  # Importing Hydra takes longer than all other imports here.
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override

PRIMARY = "config"
# A cache of files as Hydra read them, by name, path and content: sweeps and tests compose often.
_known_files: dict[tuple[str, Path, str], Any] = {}
MAX_KNOWN_FILES = 500


def open_loader() -> "ConfigLoaderImpl":
    """Make Hydra's loader over the current folder's `conf/` and the shipped one.

    The search path is built here, because Hydra's own requires a config.yaml in the first folder.
    """
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    version.setbase("1.3")
    setup_globals()
    Plugins.instance()  # Registers the readers of files.
    search_path = ConfigSearchPathImpl()
    search_path.append("hydra", "pkg://hydra.conf")
    for folder in resources.conf_dirs():
        search_path.append("openenv-pipe", str(folder))
    search_path.append("schema", "structured://")  # Hydra requires this to be the last entry.
    loader = ConfigLoaderImpl(search_path)

    class CheckedFiles(CachingConfigRepository):
        """Reads each file once, after `check_file`; later reads are copies."""

        def load_config(self, config_path: str) -> Any:
            return _read_file(config_path, super().load_config)

    # The class has the methods of a repository, but not its base class.
    loader.repository = CheckedFiles(loader.repository)  # type: ignore[assignment]
    return loader


def _read_file(name: str, read: Callable[[str], Any]) -> Any:
    """Read a file, such as `env/wordle`, by Hydra. Raises a ConfigError that names the file."""
    from hydra.errors import HydraException

    path = find_file(name)
    if path is None:  # one of Hydra's own, or none
        return read(name)
    is_experiment = name.startswith(f"{EXPERIMENTS}/")
    key = name, path, check_file(path, is_experiment=is_experiment)
    if (known := _known_files.get(key)) is not None:
        return copy.deepcopy(known)
    try:
        found = read(name)
    except (HydraException, ValueError) as error:  # a malformed header or defaults list
        raise ConfigError(visible(f"{path}: {str(error).splitlines()[0]}")) from error
    if is_experiment and found is not None:
        found.header["package"] = "_global_"  # Hydra finds it in the first line only.
    if len(_known_files) == MAX_KNOWN_FILES:
        _known_files.clear()
    _known_files[key] = copy.deepcopy(found)
    return found


class ComposedFiles:
    """The files that a configuration consists of, and what is changed in them."""

    def __init__(self, loader: "ConfigLoaderImpl", lines: list[str]) -> None:
        from hydra._internal.defaults_list import create_defaults_list

        self.loader = loader
        parsed, self._repository = loader._parse_overrides_and_create_caching_repo(PRIMARY, lines)
        found = create_defaults_list(
            repo=self._repository,
            config_name=PRIMARY,
            overrides_list=parsed,
            prepend_hydra=False,  # Hydra's own settings would double the work.
            skip_missing=False,
        )
        self.defaults, self._changes = found.defaults, found.config_overrides

    def read(self, name: str) -> Any:
        """Return a file, such as `env/wordle`, as Hydra has read it; `merged` modifies it."""
        return self._repository.load_config(name)

    def merged(self) -> Any:
        """Return the OmegaConf tree of all files, with the overrides applied."""
        tree = self.loader._compose_config_from_defaults_list(self.defaults, self._repository)
        self.loader._apply_overrides_to_config(self._changes, tree)
        return tree


def find_origins(files: ComposedFiles, overrides: Sequence["Override"] = ()) -> Origins:
    """Return, by dotted key, the last file or override that sets the key.

    overrides: those that set keys, and not whole groups.
    """
    from omegaconf import OmegaConf

    origins: Origins = {}
    for default in files.defaults:
        path = default.config_path
        if path is None:
            continue
        found = files.read(path)
        file = Path(found.path.removeprefix("file://")) / f"{path}.yaml"
        values = OmegaConf.to_container(found.config, resolve=False)
        origins |= dict.fromkeys(flat(values, default.package or ""), file)
    for override in overrides:
        key = override.key_or_group
        origins |= dict.fromkeys(flat(override.value(), key), override.input_line or "")
    return origins
