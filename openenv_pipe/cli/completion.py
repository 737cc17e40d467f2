"""What the shell offers for overrides when TAB is pressed. Composes nothing, so it is quick."""

import os
from pathlib import Path

from openenv_pipe.system.resources import group_names, group_options


def complete_override(incomplete: str) -> list[str]:
    """Continuations of an override: `conf=wordle`, `trainer.steps=`."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values(key)]
    keys = [*group_names(), *_keys_below(incomplete.rpartition(".")[0])]
    # A shell ends a word that it has completed: where values are known they follow at once.
    return [
        f"{name}={value}"
        for name in dict.fromkeys(keys)
        if name.startswith(incomplete)
        for value in _values(name) or [""]
    ]


def complete_run(incomplete: str) -> list[str]:
    """Continuations of a run's folder, or of a sweep's, below `runs/` or where the word points."""
    typed = Path(incomplete)
    bases = {Path("runs"), typed, typed.parent} if incomplete else {Path("runs")}
    found = {
        str(path)
        for base in sorted(bases)
        for pattern in ("run.json", "*/run.json", "*/*/run.json")
        for path in (file.parent for file in base.glob(pattern))
    }
    found |= {str(path) for base in bases for path in base.glob("sweeps/*") if path.is_dir()}
    return sorted(name for name in found if name.startswith(incomplete))


def complete_subject(incomplete: str) -> list[str]:
    """Continuations of what `eval` takes: runs, and overrides."""
    return [*complete_run(incomplete), *complete_override(incomplete)]


def complete_target(incomplete: str) -> list[str]:
    """Continuations of a target of `openenv-pipe env`: a block's name, or an experiment."""
    names = [*group_options("env"), *(f"conf={name}" for name in group_options("conf"))]
    return [name for name in names if name.startswith(incomplete) and name != "base"]


def complete_bash_value() -> bool:
    """Print the values of a key, if that is where bash is; False if not.

    Bash breaks words at `=`, and takes only what follows; typer knows no way to say so.
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
