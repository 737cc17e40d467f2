"""Recognise run folders that this user made, and act on no others without trust.

The configuration of a run names code: commands, functions, environment packages, images. A new run
folder gets a signature by the user's own key (`runs/user_key.py`), of the configuration and of
the paths in the current folder from which it loads code. Whoever wants to run what a folder names
calls `check_trust` first. Reading a folder needs no trust, because reading runs nothing.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.diff import flat
from openenv_pipe.config.schema import EnvConfig, RunConfig
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.runs.user_key import NoKeyError, is_signed, sign
from openenv_pipe.system.resources import env_in_current_folder, module_in_current_folder
from openenv_pipe.system.secrets import MARK

# Keys whose values are functions or classes, as module:name.
BESIDE = r"(?:beside\.[^.]+\.)?"
TARGETS = (
    rf"{BESIDE}env\.baselines\..+|engine\.policy|trainer\.warm_start\.source\.policy"
    r"|(?:.+\.)?target"
)
# Keys whose values are programs, code, servers, or arguments of these.
CODE = re.compile(
    rf"(?s){TARGETS}|.+\.(?:options|keywords)(?:\..+)?"
    rf"|{BESIDE}(?:env\.(?:command|package|python|variables\..+|tasks\.(?:train|eval)\.path)"
    r"|host\.(?:image|build_args\..+|urls|headers\..+|kubeconfig|context|namespace|secrets|pod_spec"
    r"\..+)|judge\.(?:base_url|model|arguments|variables\..+)"
    r"|reward\.terms\..+\.source\.(?:url|headers\..+))"
    r"|engine\.(?:image|arguments|variables\..+|url|base_url)"
    r"|trainer\.warm_start\.source\.(?:path|engine\.base_url)"
    r"|tracker\.[^.]+\.(?:uri|entity|endpoint|headers\..+)"
    r"|agent\.(?:command|variables\..+|files\..+|sandbox\.(?:image|mounts\..+))"
    rf"|model\.path|trainer\.loss\.kl\.reference|beside\.[^.]+\.teacher|{BESIDE}eval\.opponent"
)
# What an environment may load, by a variable: a function, or an environment such as module:Id-v0.
FUNCTION = re.compile(r"[\w.]+:[\w./-]+")
MAX_LENGTH = 200  # characters of a value in a message
MAX_LINES = 50


def local_code(config: RunConfig) -> list[str]:
    """Return the paths in the current folder from which code of this configuration is loaded."""
    found: set[Path | None] = set()
    for key, value in flat(config.model_dump(mode="json")).items():
        if re.fullmatch(TARGETS, key, re.DOTALL) and value:
            found.add(module_in_current_folder(str(value)))
    for each in config.environments.values():
        found.update(_code_of_environment(each))
    return sorted(str(path.resolve()) for path in found if path is not None)


def _code_of_environment(config: RunConfig) -> Iterator[Path | None]:
    env = config.env
    for name in functions_of_variables(env):
        yield module_in_current_folder(name)
    if env.package is not None:
        with suppress(ConfigError):  # A package that does not exist is rejected elsewhere.
            yield env_in_current_folder(env.package)
    elif env.command is not None and config.host.type == "process":
        yield Path.cwd()  # where the command is started
    for program in (env.python, getattr(config.host, "kubeconfig", None)):
        if program and "/" in program and not Path(program).expanduser().is_absolute():
            yield Path(program)


def functions_of_variables(env: EnvConfig) -> list[str]:
    """Return the values of an environment's variables that may name a function to import."""
    return [value for value in env.variables.values() if value and FUNCTION.fullmatch(value)]


def signed_text(config_digest: str, paths: Sequence[str]) -> str:
    """Return what the signature of a run folder signs. paths: of `local_code`."""
    return json.dumps(["run", config_digest, *paths])


def try_to_sign(text: str) -> str | None:
    """Return the signature of a text; None if this user has no key."""
    try:
        return sign(text)
    except NoKeyError:
        return None


def why_untrusted(text: str, signature: str | None) -> str | None:
    """Say why the signature does not show that this user signed the text; None if it does."""
    if signature is None:
        return "it carries no signature, as one of a user without a key"
    try:
        is_own = is_signed(text, signature)
    except NoKeyError as error:
        return f"whether you made it cannot be checked, since {error}"
    return None if is_own else "another user made it, or you on another machine"


def check_trust(
    path: Path,
    config: RunConfig,
    *,
    digest: str,
    recorded_digest: str,
    recorded_paths: Sequence[str],
    signature: str | None,
) -> None:
    """Raise RunFolderError unless this user made the run folder `path` and it is as it was.

    config: what its config.json says, of which `digest` is the sha256. The other arguments are what
    its run.json says.
    """
    untrusted: str | None
    if digest != recorded_digest:
        untrusted = "its config.json was changed after it was written (run.json has another sha256)"
    else:
        untrusted = why_untrusted(signed_text(digest, recorded_paths), signature)
    new = sorted({*local_code(config)} - {*recorded_paths})
    if untrusted is None and new:
        untrusted = "code would be loaded from the current folder, which was not so in the run"
    if untrusted is None:
        return
    lines = [f"  {line}" for line in [*_described(config), *(f"from {each!r}" for each in new)]]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"  and {len(lines) - MAX_LINES} more"]
    raise RunFolderError(
        f"{path} is not trusted: {untrusted}. It names this code, and servers, models and files:\n"
        + "\n".join(lines)
        + f"\nRead {path / 'config.json'}; if you trust who wrote it, repeat the command with "
        "--trust (from Python: trust=True)"
    )


def _described(config: RunConfig) -> Iterator[str]:
    """Yield `key: value` for all that a run of the configuration would execute or contact."""
    yield f"host.type: {config.host.type}"
    for key, value in flat(config.model_dump(mode="json")).items():
        if value in (None, [], {}, ""):
            continue
        if CODE.fullmatch(key) or MARK.search(str(value)):
            yield f"{as_ascii(key)[1:-1]}: {as_ascii(value)}"


def as_ascii(value: JsonValue) -> str:
    """Return a value of an untrusted file fit to be shown: short, without control characters."""
    text = ascii(value)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."
