"""Shell completion of overrides and runs. It composes no configuration, to be quick."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from openenv_pipe.cli.streams import is_live
from openenv_pipe.system.files import cache_folder
from openenv_pipe.system.resources import group_names, group_options

# Where typer installs the completion of bash, zsh and fish, in the home folder.
INSTALLED = (
    ".bash_completions/openenv-pipe.sh",
    ".zfunc/_openenv-pipe",
    ".config/fish/completions/openenv-pipe.fish",
)


def offer_completion() -> None:
    """Name `--install-completion` on stderr, once for each user, in a terminal and not in CI."""
    if not is_live(sys.stderr) or not sys.stdout.isatty() or "CI" in os.environ:
        return
    # Errors: it was offered before, the mark of that cannot be written, or there is no home folder.
    with suppress(OSError, RuntimeError):
        if any((Path.home() / name).exists() for name in INSTALLED):
            return
        offered = cache_folder() / "completion_offered"
        offered.parent.mkdir(parents=True, exist_ok=True)
        offered.touch(exist_ok=False)
        print("enable tab completion: openenv-pipe --install-completion", file=sys.stderr)


def complete_override(incomplete: str) -> list[str]:
    """Return continuations of an override: `conf=wordle`, `trainer.steps=`."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values(key)]
    keys = [
        name
        for name in [*group_names(), *_keys_below(incomplete.rpartition(".")[0])]
        if name.startswith(incomplete)
    ]
    while len(keys) == 1 and (inner := _keys_below(keys[0])):  # a block, which has no value
        keys = inner
    # A shell ends a word that it has completed, so known values are appended at once.
    return [f"{name}={value}" for name in dict.fromkeys(keys) for value in _values(name) or [""]]


def complete_run(incomplete: str) -> list[str]:
    """Return the folders of runs and sweeps that match, of all runs or below the typed path."""
    from openenv_pipe.runs.places import runs_folders

    typed = Path(incomplete)
    bases = {*runs_folders(), *([typed, typed.parent] if incomplete else [])}
    found = {
        str(path)
        for base in sorted(bases)
        for pattern in ("run.json", "*/run.json", "*/*/run.json")
        for path in (file.parent for file in base.glob(pattern))
    }
    found |= {str(path) for base in bases for path in base.glob("sweeps/*") if path.is_dir()}
    return sorted(name for name in found if name.startswith(incomplete))


def complete_subject(incomplete: str) -> list[str]:
    """Return continuations of an argument of `eval`: runs and overrides."""
    return [*complete_run(incomplete), *complete_override(incomplete)]


def complete_bash_value() -> bool:
    """Print the values of a key if bash completes one; return False if it does not.

    Bash splits words at `=` and expects only what follows it, which typer does not support.
    """
    words, position = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    current = words[position] if position < len(words) else ""
    if current == "=" and position >= 1:
        key, start = words[position - 1], ""
    elif position >= 2 and words[position - 1] == "=":
        key, start = words[position - 2], current
    else:
        return False
    print("\n".join(value for value in _values(key) if value.startswith(start)))
    return True


def _values(key: str) -> list[str]:
    if key in group_names():
        return group_options(key)
    from openenv_pipe.config.schema_keys import choices, locate

    return choices(locate(key.split("."))[2])


def _keys_below(parent: str) -> list[str]:
    from openenv_pipe.config.schema_keys import known_keys

    return [key for key in known_keys() if key.rpartition(".")[0] == parent]
