"""Serve the application of an environment's package with uvicorn.

    python serve_package.py PACKAGE_FOLDER APP [uvicorn's options]

`process.ProcessHost` starts it as a program, in the interpreter of the environment, so it uses
nothing of this package.
"""

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WEB_PAGE = "openenv.core.env_server.web_interface"
# What OpenEnv's own package imports from the page; nothing imports these names before it does.
FORWARDED = ("create_web_interface_app", "WebInterfaceManager")


class LateWebPage(MetaPathFinder, Loader):
    """Imports OpenEnv's web page when it is used, and not when OpenEnv is imported.

    The page needs gradio: two seconds of processor time and 120 MB for each server, of which few
    are asked for the page (ENABLE_WEB_INTERFACE).
    """

    def __init__(self) -> None:
        self._forwarded = set(FORWARDED)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == WEB_PAGE else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = self._find

    def _find(self, name: str) -> Any:
        """Return the attribute of the page's module, or a function that calls it later.

        Raises AttributeError, also for what Python itself looks for in an imported module.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._forwarded:
            return getattr(self._real_module(), name)
        self._forwarded.remove(name)

        def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self._real_module(), name)(*arguments, **options)

        return call

    def _real_module(self) -> ModuleType:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            del sys.modules[WEB_PAGE]
        return importlib.import_module(WEB_PAGE)


def main() -> None:
    package = sys.argv.pop(1)
    del sys.path[0]  # This file's folder, whose names would hide those of libraries.
    import uvicorn

    # Modules of a package import each other by the package's name or, as in its container, from the
    # package's own folder. That folder is the last on the path, so that a `types.py` in it hides
    # nothing.
    sys.path.insert(0, os.path.dirname(package))  # noqa: PTH120 - pathlib would take time to import
    sys.path.append(package)
    sys.meta_path.insert(0, LateWebPage())
    uvicorn.main()


if __name__ == "__main__":
    main()
