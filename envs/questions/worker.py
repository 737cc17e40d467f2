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
    """Import the function, then score until the rows end."""
    folder, target = sys.argv[1:]
    # This folder's modules are those of the package, and would hide others of their names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if folder:
        sys.path.append(folder)
    rows, written = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Neither the function nor what it starts reads rows; what they print is in the server's log.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # A module of the user's may raise anything.
        print(json.dumps(failure(error)), file=written, flush=True)
        return
    print("{}", file=written, flush=True)
    for line in rows:
        print(json.dumps(scored(function, *json.loads(line))), file=written, flush=True)


def scored(function, answer, row):
    """Return {"score": number}, or {"error": text} if the function fails."""
    try:
        score = float(function(answer, row))
    except (Exception, SystemExit) as error:  # A function of the user's may raise anything.
        return failure(error)
    if not math.isfinite(score):
        return {"error": f"it returned {score}, expected a finite number"}
    return {"score": score}


def failure(error):
    return {"error": f"{type(error).__name__}: {error!s:.500}"}


if __name__ == "__main__":
    main()
