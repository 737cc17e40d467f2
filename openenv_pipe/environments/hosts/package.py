"""An environment package in OpenEnv's layout: its manifest and the digest of its code."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import JsonValue

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.resources import find_env

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

NOT_CODE = ("__pycache__", ".git", ".venv", "build")
USUAL_APP = "server.app:app"  # in OpenEnv's layout; older manifests do not name it


def manifest(package: Path) -> dict[str, Any]:
    """Read the package's openenv.yaml; empty if there is none but the usual app is there.

    Raises:
        ConfigError: The folder is not a package of OpenEnv's layout, or the file is damaged.
    """
    path = package / "openenv.yaml"
    if not path.exists() and _has_usual_app(package):
        return {}
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"env.package={package} is no OpenEnv package, which has an openenv.yaml or a "
            f"server/app.py: {error}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} contains {values!r:.80}, expected keys and values")
    return values


def manifest_app(package: Path) -> str:
    """Return the package's app, such as 'server.app:app', from `app` of its openenv.yaml.

    The key may be left out, or be relative to a folder above ('envs.my_env.server.app:app').

    Raises:
        ConfigError: the key has another form.
    """
    app = manifest(package).get("app")
    if app is None and _has_usual_app(package):
        return USUAL_APP
    if not isinstance(app, str) or ":" not in app:
        raise ConfigError(
            f"{package / 'openenv.yaml'}: app is {app!r}, expected a text like {USUAL_APP!r}"
        )
    first = package / app.partition(".")[0].partition(":")[0]
    if not first.exists() and not first.with_suffix(".py").exists():
        return app.rpartition(f"{package.name}.")[2]
    return app


def _has_usual_app(package: Path) -> bool:
    return (package / "server" / "app.py").is_file()


def package_of(env: "EnvConfig") -> Path | None:
    """Return the folder of the package that is served; None with `env.command`, whose code is not
    known. Raises ConfigError if it is not found."""
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
    """Return the sha256 of each of those files by its relative name."""
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
    """Return the sha256 of files, by sorted relative names and contents, and of a text.

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
