"""Limits the connections of every uvicorn server in this process, which a run has started.

An environment's server also gets a check of its key; vLLM's gets that by `--middleware`.

Python imports this module at its start, because the folder is on PYTHONPATH, and so do the children
of a server that reloads or has several workers. Nothing of uvicorn is imported before the server
itself imports it. Servers choose their own Python, from 3.9 on.
"""

import functools
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

# pathlib would take time to import, in every Python process of the server.
HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
MODULE = "uvicorn.config"


class WhenUvicornIsImported:
    """Finds nothing itself, and changes uvicorn's module once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = functools.partial(load, spec.loader.exec_module)
                return spec
        return None


def load(execute, module):
    """Load uvicorn's module, whose configurations then choose our connections and middleware."""
    execute(module)
    load_app = module.Config.load

    @functools.wraps(load_app)
    def load_protected(self):
        from openenv_pipe_key import OnlyTheHost
        from openenv_pipe_limits import connection_class

        load_app(self)
        self.http_protocol_class = connection_class()
        if OnlyTheHost.VARIABLE in os.environ:
            self.loaded_app = OnlyTheHost(self.loaded_app)

    module.Config.load = load_protected


def import_next():
    """Import the sitecustomize that Python would have found without this folder, if there is one.

    Python reports its errors as those of this module.
    """
    others = [path for path in sys.path if os.path.abspath(path) != HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("OPENENV_PIPE_KEY") or os.environ.get("VLLM_API_KEY"):
    sys.meta_path.insert(0, WhenUvicornIsImported())
import_next()
