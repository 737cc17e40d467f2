"""Rooms import only rooms below them, few files import each heavy library, and all are small."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from openenv_pipe.registry import extras

PACKAGE = Path(__file__).parents[2] / "openenv_pipe"

# The rooms from the bottom up: each imports only itself and those before it.
ROOMS = (
    *(
        "types",
        "errors",
        "registry",
        "core",
        "__init__",
        "client",
        "system",
        "config",
        "algorithms",
        "models",
        "environments",
    ),
    *("engines", "learner", "rewards", "runs", "rollout", "trackers", "reports"),
    *("pipeline", "commands", "cli", "extras"),
)
LEVELS = {room: level for level, room in enumerate(ROOMS)}

# Heavy libraries, and the only places that may import each.
ALLOWED_PLACES = {
    "hydra": {
        "config/compose.py",
        "config/composed_files.py",
        "extras/sweeps/multirun.py",
    },
    "omegaconf": {"config/compose.py", "config/composed_files.py"},
    "typer": {"cli/*.py", "extras/*/cli*.py"},
    "httpx": {"client.py"},
    "websockets": {"environments/client/session.py"},
    "peft": {"models/*", "learner/*", "extras/cpu_sampling/*", "extras/devices/*"},
    "docker": {"extras/containers/docker/*.py"},
    "ray": {"system/ray_connection.py", "extras/cluster/nodes.py"},
    "kubernetes": {"extras/containers/kubernetes/api.py"},
    "optuna": {"extras/sweeps/search.py"},
    "datasets": {"environments/tasks/data_sets.py"},
    "starlette": {"extras/viewer/web/*.py", "extras/agents/*.py", "extras/agents/*/*.py"},
    "wandb": {"extras/trackers/wandb.py"},
    "mlflow": {"extras/trackers/mlflow.py"},
    "trackio": {"extras/trackers/trackio.py"},
    "opentelemetry": {"extras/trackers/*"},
    # Environment servers use it; agents/http/capture.py loads a part of it.
    "openenv": {"extras/lab/find.py"},
    "trl": set(),  # only the tests use it
}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FILES = [path for path in FILES if "/template/" not in path]


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


@cache
def imported_modules(path: str) -> set[str]:
    """Return the full names of all modules that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: name the module in full"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_rooms(path: str) -> set[str]:
    names = (name.split(".") for name in imported_modules(path))
    rooms = {name[1] for name in names if name[0] == "openenv_pipe" and len(name) > 1}
    return {room if room in LEVELS else "__init__" for room in rooms}


def test_imports_point_downward():
    found = []
    # `openenv_pipe/__init__.py` is the public API of the rooms above it, and imports them lazily.
    for path in filter("__init__.py".__ne__, FILES):
        room = room_of(path)
        assert room in LEVELS, f"{path}: say in ROOMS where the room {room!r} belongs"
        upward = imported_rooms(path) - {room}
        found += [f"{path}: {each}" for each in upward if LEVELS[each] >= LEVELS[room]]
    assert not found


def test_no_file_names_an_extra_but_those_of_the_extra_itself():
    found = []
    for path in FILES:
        room, own, *_ = [*Path(path).parts, ""]
        named = set(re.findall(r"\bextras[./](\w+)", (PACKAGE / path).read_text()))
        found += [f"{path}: {each}" for each in named - ({own} if room == "extras" else set())]
    assert not found


def test_the_core_names_commands_of_extras_only_if_they_are_there():
    """In texts of the program; comments and docstrings are for readers of the code."""
    commands = {command.name for extra in extras() for command in extra.commands}
    unconditional = []
    for path in FILES:
        if room_of(path) == "extras" or "/inside/" in path:
            continue
        named, asked = set(), set()
        tree = ast.parse((PACKAGE / path).read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "if_command":
                asked.add(ast.literal_eval(node.args[0]))
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                named |= {*re.findall(r"openenv-pipe ([a-z]+)", str(node.value))} & commands
        unconditional += [f"{path}: {each}" for each in named - asked]
    assert not unconditional


def test_rules_import_nothing_of_the_schema_which_reads_them():
    """Else a program that imports the rules first fails; names for annotations are no imports."""
    for path in (path for path in FILES if path.startswith("config/rules/")):
        for node in ast.parse((PACKAGE / path).read_text()).body:
            assert not getattr(node, "module", "").startswith("openenv_pipe.config.schema"), path


def test_heavy_libraries_are_imported_in_allowed_places_only():
    found = []
    for path in FILES:
        for name in imported_modules(path):
            places = ALLOWED_PLACES.get(name.split(".")[0], ["*"])
            if not any(Path(path).match(place) for place in places):
                found.append(f"{path}: {name}")
    assert not found


def test_rollout_knows_contracts_only():
    found = []
    for path in FILES:
        for name in imported_modules(path) if room_of(path) == "rollout" else ():
            top, room, module, *_ = [*name.split("."), "", ""]
            is_contract = room not in ("engines", "rewards", "learner", "runs") or module == "base"
            if top in ("torch", "transformers") or not is_contract:
                found.append(f"{path}: {name}")
    assert not found


def test_files_are_small_enough_to_be_read_in_one_go():
    assert not [path for path in FILES if len((PACKAGE / path).read_text().splitlines()) > 400]


@pytest.mark.parametrize("folder", ["openenv_pipe", "envs", "tests"])
def test_functions_are_small_enough_to_be_read_in_one_go(folder):
    long = []
    for path in (PACKAGE.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > 60:
                    long.append(f"{path}:{node.lineno}: {node.name} has {num_lines} lines")
    assert not long, "\n".join(long)
