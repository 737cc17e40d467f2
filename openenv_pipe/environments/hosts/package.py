"""An environment package in OpenEnv's layout: its manifest and the digest of its code."""

import glob
import hashlib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import JsonValue

from openenv_pipe.config.error_messages import explain_yaml
from openenv_pipe.config.yaml_files import check_file
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.child_environment import given_variables
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.resources import did_you_mean, find_env

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

NOT_CODE = ("__pycache__", ".git", ".venv", "build")
MANIFEST = "openenv.yaml"
VARIABLES = "env.variables"
# A module and an attribute of it, both dotted names.
APP = re.compile(r"[^\s:./]+(\.[^\s:./]+)*:[^\s:./]+(\.[^\s:./]+)*")
USUAL_APP = "server.app:app"  # in OpenEnv's layout; older manifests do not name it


def manifest(package: Path) -> dict[str, Any]:
    """Read the package's openenv.yaml; empty if there is none but the usual app is there.

    Raises ConfigError: The folder is not a package of OpenEnv's layout, or the file is damaged.
    """
    path = package / MANIFEST
    if not path.exists():
        if _has_usual_app(package):
            return {}
        raise ConfigError(
            f"env.package={package} is not an OpenEnv package, which has an openenv.yaml or a "
            "server/app.py"
        )
    check_file(path, is_experiment=False)
    try:
        with path.open(encoding="utf-8") as file:  # YAML's errors name an open file
            values: dict[str, Any] = yaml.safe_load(file) or {}
    except yaml.YAMLError as error:
        raise ConfigError(explain_yaml(error)) from None
    except ValueError as error:  # of a value that looks like a date
        raise ConfigError(f"{path}: {error}; put it in quotes if it is a string") from None
    return values


def manifest_app(package: Path) -> str:
    """Return the package's app, such as 'server.app:app', from `app` of its openenv.yaml.

    The key may be left out, or be relative to a folder above ('envs.my_env.server.app:app').

    Raises ConfigError: the key has another form, or names a module that is not there.
    """
    path, app = package / MANIFEST, manifest(package).get("app")
    if app is None and _has_usual_app(package):
        return USUAL_APP
    expected = f"expected a string like {USUAL_APP!r}, which is `app` in server/app.py"
    if app is None:
        raise ConfigError(f"{path} has no key app, and there is no server/app.py; {expected}")
    if not isinstance(app, str) or not APP.fullmatch(app):
        raise ConfigError(f"{path}: app is {app!r:.80}, {expected}")
    if not _has_module(package, app.partition(".")[0].partition(":")[0]):
        app = app.rpartition(f"{package.name}.")[2]
    module = app.partition(":")[0]
    if not _has_module(package, module):
        file = f"{module.replace('.', '/')}.py"
        raise ConfigError(f"{path}: app is {app!r}, and there is no {package / file}; {expected}")
    return app


def _has_module(package: Path, module: str) -> bool:
    """Return whether the package has this Python module: a folder, or a file of any kind."""
    path = package.joinpath(*module.split("."))
    return path.is_dir() or any(path.parent.glob(f"{glob.escape(path.name)}.*"))


def _has_usual_app(package: Path) -> bool:
    return (package / "server" / "app.py").is_file()


def check_variables(env: "EnvConfig") -> None:
    """Check `env.variables` against the values that `variables` in the openenv.yaml lists.

    A listed value with * means any text in its place. Variables that are not listed may have any.

    Raises ConfigError: A variable has another value, or `variables` has another form.
    """
    package = package_of(env)
    if package is None or not (package / MANIFEST).exists():
        return
    path, listed = package / MANIFEST, manifest(package).get("variables", {})
    if not isinstance(listed, dict):
        raise ConfigError(
            f"{path}: variables is {listed!r:.80}, expected the values of each variable, such as "
            "`variables: {MODE: [easy, hard]}`"
        )
    given = given_variables(env.variables, VARIABLES)
    for name, values in listed.items():
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise ConfigError(
                f"{path}: variables.{name} is {values!r:.80}, expected a list of its values, such "
                "as [easy, hard]; put numbers, true and false between quotes"
            )
        value = given.get(name)
        if value is not None and not any(fnmatchcase(value, each) for each in values):
            raise ConfigError(
                f"{VARIABLES}.{name} is {value!r:.80}, expected {', '.join(values)}"
                f"{did_you_mean(value, values)}; {path} lists them"
            )


def package_of(env: "EnvConfig") -> Path | None:
    """Return the served package's folder; None with `env.command`. Raises ConfigError."""
    # The code behind `env.command` is not known.
    return None if env.command or env.package is None else find_env(env.package)


def code_facts(package: Path | None) -> dict[str, JsonValue]:
    """Return the sha256 of the package's code, and that of each file, by their keys in run.json."""
    if package is None:
        return {}
    files = code_files(package)
    return {"env_code": _digest_of(files), "env_files": dict(files)}


def code_digest(package: Path) -> str:
    """Return the sha256 of the package's files, except those that Python and git add."""
    return _digest_of(code_files(package))


def code_files(package: Path) -> dict[str, str]:
    """Return the sha256 of each file that `code_digest` covers, by its relative name."""
    paths = (path.relative_to(package) for path in package.rglob("*"))
    return _digests(
        package,
        (
            path.as_posix()
            for path in paths
            if not any(part in NOT_CODE or part.endswith(".egg-info") for part in path.parts)
        ),
    )


def digest_of_files(root: Path, names: Iterable[str], beside: str = "") -> str:
    """Return one sha256 of the sorted relative names and the contents of files, and of a text.

    beside: the text. Folders among `names` are skipped.
    """
    return _digest_of(_digests(root, names), beside)


def _digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: digest_of_file(root / name) for name in sorted(names) if (root / name).is_file()}


def _digest_of(files: Mapping[str, str], beside: str = "") -> str:
    digest = hashlib.sha256(beside.encode())
    for name, content in files.items():
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()
