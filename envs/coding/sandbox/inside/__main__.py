"""Confine the process, then run a submission. The sandbox depends on the order of these lines."""

import os

import gate
from confinement import confine
from conversation import call, end, load, receive, send


def main() -> None:
    """Load one submission's code, then answer lists of calls until the requests end."""
    request = receive()
    gate.load_modules(request["code"])
    try:
        layers = confine(request["cpu_s"], request["memory_mb"], request.pop("root"))
    except OSError as error:
        end(unavailable=str(error))
    gate.close(
        report=lambda attempt: end(violation=attempt),
        overflow=lambda: end(limit="printed text"),
    )
    send({"layers": layers})
    function = load(request["code"], request["function"])
    while function is not None:
        send({"results": [call(function, arguments) for arguments in receive()["calls"]]})
    os._exit(0)  # A normal exit would make system calls that the filter kills as violations.


main()
