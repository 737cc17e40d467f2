"""`openenv-pipe env new`: create a small working environment to start from.

`template/` is an environment called my_env with its configuration. A new environment is a copy in
which that name is replaced in all its forms.
"""

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import BASE, group_options, short_path

TEMPLATE = Path(__file__).parent / "template"
# Not a file in `template/`, where it would hide the template's own files from git.
GITIGNORE = """# made here
/runs/
/results/
/.runs/
/released/
/.openenv-pipe/
/.venv/
*.egg-info/

# caches
__pycache__/
.pytest_cache/
"""


def create_environment(name: str, folder: Path) -> list[Path]:
    """Write `envs/name` and its `conf/` files below the folder; return the sorted files.

    Nothing is overwritten. A `.gitignore` is written too, unless the folder has one.

    Raises ConfigError: the name is invalid or taken.
    """
    _reject_bad_name(name)
    files = {
        folder / _renamed(str(path.relative_to(TEMPLATE)), name): path
        for path in sorted(TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path in [folder / "envs" / name, *files]:
        if path.exists():
            raise ConfigError(
                f"{short_path(path)} is there already, and nothing is overwritten; choose another "
                "name, or remove it"
            )
    for path, template in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(template.read_text(), name))
    ignored = folder / ".gitignore"
    if ignored.exists():
        return sorted(files)
    ignored.write_text(GITIGNORE)
    return sorted([ignored, *files])


def _renamed(text: str, name: str) -> str:
    words = name.split("_")
    text = text.replace("MyEnv", "".join(word.capitalize() for word in words))
    text = text.replace("My env", " ".join(words).strip().capitalize())
    return text.replace("my_env", name)


def _reject_bad_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} is not a name for an environment; expected a Python package's, of lowercase "
            "letters, digits and single _, such as my_env"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"there is a Python module {name!r} already, which the environment would hide or be "
            f"hidden by; choose another name, such as {name}_env"
        )
    if name in (BASE, *group_options("env"), *group_options("conf")):
        raise ConfigError(f"conf/ already has the name {name!r}; choose another name")
