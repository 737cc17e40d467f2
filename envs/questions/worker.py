"""Runs a scoring function for `workers`: lines of JSON on stdin, one line each on stdout.

It is started as a program, and imports nothing of this package but what the function needs.
"""

import importlib
import json
import math
import os
import sys
from pathlib import Path


def main() -> None:
    """Import the function, then score until stdin ends."""
    folder, target = sys.argv[1:]
    # This folder's modules are those of the package, and would hide others of their names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if folder:
        sys.path.append(folder)
    written = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the function prints goes to the server's log.
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # A module of the user's may raise anything.
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=written, flush=True)
        return
    print("{}", file=written, flush=True)
    for line in sys.stdin:
        print(json.dumps(scored(function, *json.loads(line))), file=written, flush=True)


def scored(function, answer, row):
    """Return {"score": number}, or {"error": text} if the function fails."""
    try:
        score = float(function(answer, row))
    except (Exception, SystemExit) as error:  # A function of the user's may raise anything.
        return {"error": f"{type(error).__name__}: {error}"}
    if not math.isfinite(score):
        return {"error": f"it returned {score}, expected a finite number"}
    return {"score": score}


if __name__ == "__main__":
    main()
