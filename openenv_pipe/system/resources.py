"""Find configuration files (`conf/`), environments (`envs/`) and callables.

The search path is the current folder, then the plugins sorted by name, then the shipped files.
The first of several files with the same name is used. Only `load_callable` imports modules.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.optional_packages import how_to_install
from openenv_pipe.system.plugins import plugin_dirs, unusable_plugins_note

PACKAGE_DIR = Path(__file__).resolve().parents[1]
BASE = "base"  # a group's file that others include; it is not an option itself


def conf_dirs() -> list[Path]:
    """Return the search path of configuration files, first to last."""
    return _search_dirs("conf")


def env_dirs() -> list[Path]:
    """Return the search path of environment packages, first to last."""
    return _search_dirs("envs")


def shipped_dir(name: str) -> Path:
    """Return the shipped `conf` or `envs`: inside an installed wheel, or at a checkout's root."""
    packaged = PACKAGE_DIR / name
    return packaged if packaged.is_dir() else PACKAGE_DIR.parent / name


def _search_dirs(name: str) -> list[Path]:
    own, shipped = Path.cwd() / name, shipped_dir(name)
    is_own = own.is_dir() and not own.samefile(shipped)
    return [*([own] if is_own else []), *plugin_dirs(name), shipped]


def short_path(path: Path) -> str:
    """Return the path relative to the current folder if it is inside it, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def group_names() -> list[str]:
    """Return the configuration groups: `env`, `model`, and all other folders of `conf/`."""
    return _names(path.name for folder in conf_dirs() for path in folder.iterdir() if path.is_dir())


def group_options(group: str) -> list[str]:
    """Return the options of `group=`: the YAML files of its folders, without `base`."""
    stems = [path.stem for folder in conf_dirs() for path in folder.glob(f"{group}/*.yaml")]
    return _names(stem for stem in stems if stem != BASE)


def _names(found: Iterable[str]) -> list[str]:
    return sorted({name for name in found if not name.startswith((".", "_"))})


def find_env(package: str) -> Path:
    """Return an environment package's folder, given its path or a bare name in `env_dirs()`.

    Raises ConfigError, which lists the available names.
    """
    if "/" in package or package.startswith("."):
        folder = Path(package).expanduser()
        if folder.is_dir():
            return folder.resolve()
        raise ConfigError(
            f"env.package={package!r} is not a folder; expected the folder of an OpenEnv package, "
            "or a bare name to look for in envs/"
        )
    folders = env_dirs()
    for folder in folders:
        if (folder / package).is_dir():
            return folder / package
    names = _names(path.name for folder in folders for path in folder.iterdir() if path.is_dir())
    raise ConfigError(
        f"env.package={package!r} was not found in {' or '.join(map(short_path, folders))}; "
        f"there are: {', '.join(names)}{did_you_mean(package, names)}; "
        f"for a package elsewhere give its folder, such as ./my_env{unusable_plugins_note()}"
    )


def load_callable(dotted: str) -> Callable[..., Any]:
    """Import `package.module:name`, also from `envs/` folders and the current folder.

    Folders are added at the end of `sys.path`, where they shadow no installed package, those of the
    current folder only if the module is there. Raises ConfigError on failure.
    """
    module_name, _, attribute_path = dotted.partition(":")
    is_own = module_in_current_folder(dotted) is not None
    for folder in _module_dirs():
        if folder not in sys.path and (is_own or folder not in _current_dirs()):
            sys.path.append(folder)
    value: Any = _import(module_name, dotted)
    for attribute in attribute_path.split("."):
        if not hasattr(value, attribute):
            near = did_you_mean(attribute, [name for name in dir(value) if name[0] != "_"])
            where = getattr(value, "__file__", module_name)
            raise ConfigError(f"{dotted!r}: there is no {attribute!r} in {where}{near}")
        value = getattr(value, attribute)
    if not callable(value):
        raise ConfigError(
            f"{dotted!r} has the type {type(value).__name__}; expected a function or a class"
        )
    return value


def module_in_current_folder(dotted: str) -> Path | None:
    """Return where `load_callable` would find a module in the current folder or its `envs/`.

    Returns None if it would find the module elsewhere, or not at all. Nothing is imported.
    """
    top = dotted.partition(":")[0].partition(".")[0]
    if top == PACKAGE_DIR.name:
        return None
    for folder in _module_dirs():
        spec = PathFinder.find_spec(top, [folder])
        if spec is not None and spec.origin is not None:
            # Only a package has search locations: its folder.
            found = Path(next(iter(spec.submodule_search_locations or ()), spec.origin))
            return found if str(found.parent.resolve()) in _current_dirs() else None
    folders = (Path(folder, top) for folder in _current_dirs())  # without an __init__.py
    return next((folder for folder in folders if folder.is_dir()), None)


def file_in_current_folder(dotted: str) -> Path | None:
    """Return the file of a module that `module_in_current_folder` finds. Nothing is imported."""
    found = module_in_current_folder(dotted)
    if found is None or found.is_file():
        return found
    inner = found.joinpath(*dotted.partition(":")[0].split(".")[1:])
    files = (inner / "__init__.py", inner.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def env_in_current_folder(package: str) -> Path | None:
    """Return the folder of an environment package if it depends on the current folder, else None.

    Raises ConfigError if the package does not exist.
    """
    found = find_env(package)
    if "/" in package or package.startswith("."):
        return None if Path(package).expanduser().is_absolute() else found
    return found if str(found.parent) in _current_dirs() else None


def _module_dirs() -> list[str]:
    """Return where modules are searched: `sys.path`, then `envs/` folders and the current one."""
    return list(dict.fromkeys([*sys.path, *map(str, env_dirs()), str(Path.cwd())]))


def _current_dirs() -> list[str]:
    """Return the current folder, and its `envs/` unless that is the shipped one."""
    current = Path.cwd()
    own_envs = (path for path in env_dirs() if path.parent == current)
    return [str(current), *(str(path) for path in own_envs if path != shipped_dir("envs"))]


def _module_below(module_name: str) -> str:
    """Return a hint: a module of this name in a subfolder, a similar name, or what is expected."""
    path = f"{module_name.replace('.', '/')}.py"
    for found in (each for depth in ("*", "*/*") for each in Path.cwd().glob(f"{depth}/{path}")):
        parts = found.relative_to(Path.cwd()).with_suffix("").parts
        if all(map(str.isidentifier, parts)):
            return f"did you mean {'.'.join(parts)}?"
    own = [each.stem for each in Path.cwd().glob("*.py")]
    if near := did_you_mean(module_name, own):
        return near.strip(" ()")
    return "expected module:name, such as wordle.rewards:consistent_guess"


def _import(module_name: str, dotted: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            places = ", ".join(map(short_path, [*env_dirs(), Path.cwd()]))
            raise ConfigError(
                f"{dotted!r}: there is no module {missing!r} among the installed packages or in "
                f"{places}; {_module_below(module_name)}{unusable_plugins_note()}"
            ) from error
        raise ConfigError(
            f"{dotted!r}: its module needs {missing!r}, which is not installed; "
            f"{how_to_install(missing)}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module may raise anything on import.
        raise ConfigError(
            f"{dotted!r}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return " (did you mean ...?)" with the most similar known words, or "" if none is similar."""
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
