"""openenv-pipe: from one YAML file to a trained, evaluated agent on any OpenEnv environment.

    from openenv_pipe import train

    run = train("conf=wordle", "trainer.steps=10")
    run.metrics.to_pandas()

Importing the package is quick: each name below, and each function that an extra adds, is imported
when it is used.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openenv_pipe.commands.api import compose as compose
    from openenv_pipe.commands.api import evaluate as evaluate
    from openenv_pipe.commands.api import train as train
    from openenv_pipe.runs.run import Run as Run
    from openenv_pipe.runs.run import open_run as open_run

__version__ = "0.2.0"

_MODULES = {
    **dict.fromkeys(("compose", "evaluate", "train"), "openenv_pipe.commands.api"),
    **dict.fromkeys(("Run", "open_run"), "openenv_pipe.runs.run"),
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    from openenv_pipe.registry import functions, load

    if name == "__all__":
        return sorted([*_MODULES, *functions()])
    if name in functions():
        return load(functions()[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__getattr__("__all__")])
