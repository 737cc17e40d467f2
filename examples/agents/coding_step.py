"""Take a step of the environment `coding`, as the tools of the agents beside this file do."""

import json
import os
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def run_tests(code: str) -> str:
    """Run the tests on a function, and return what the model is told."""
    request = Request(
        os.environ["OPENENV_URL"] + "/step",
        json.dumps({"action": {"code": code}}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urlopen(request) as response:
            result = json.load(response)
    except HTTPError as error:  # The episode is over.
        return error.read().decode()
    return "You are done." if result["done"] else str(result["observation"]["feedback"])
