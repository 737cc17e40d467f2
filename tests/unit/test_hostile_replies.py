"""Nothing that a model writes ends its episode as an error of our environments.

Every reply goes the way that it goes in training, without the network: through the adapter, as JSON
through the client's checks and the server's parsing, into the environment, and back.
"""

import asyncio
import json

import pytest

from openenv_pipe.environments.client.protocol import parse_frame, request_frame, step_result
from openenv_pipe.errors import StepRejectedError

pytestmark = pytest.mark.slow

MAX_BYTES = 2**20
TEXTS = {
    "empty": "",
    "blank": " \n\t\x0b",
    "NUL": "\x00",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x9b\u202e",
    "half a pair": "\ud800 a \udfff",
    "other scripts": "٣² \u0130 \U0001f600 \ufeff\uffff",
    "grows in lowercase": "\u0130" * 5,
    "huge integer": "9" * 5000,
    "NaN": "NaN",
    "infinity": "-Infinity 1e999",
    "deep": "[" * 3000,
    "long": "x" * 250_000,
    "long line of fences": "```" * 60_000,
    "fences and spaces": ("```" + " " * 100) * 600,
    "spaces": "```" + " " * 60_000,
    "numbers": "1," * 50_000,
    "words": "crane hit left " * 10_000,
    "quotes": "\"'\\{}%s{{ 7*7 }}<tool_call>",
}


def way(name):
    """Return an environment of this name and the class of its actions."""
    pytest.importorskip(f"{name}.server.app")
    module = __import__(f"{name}.server.{name}_environment", fromlist=["*"])
    models = __import__(f"{name}.models", fromlist=["*"])
    (environment,) = [
        each
        for key, each in vars(module).items()
        if key.endswith("Environment") and each.__module__ == module.__name__
    ]
    actions = [
        each
        for key, each in vars(models).items()
        if key.endswith("Action") and each.__module__ == models.__name__
    ]
    return environment(), actions[0] if actions else None


def answered(environment, action_class, action):
    """Take a step as OpenEnv's server does; return its result, or None if it was rejected."""
    from openenv.core.env_server.serialization import deserialize_action, serialize_observation
    from openenv.core.env_server.types import (
        Action,
        WSErrorResponse,
        WSObservationResponse,
    )
    from pydantic import ValidationError

    try:
        request = request_frame("step", action, MAX_BYTES)
    except StepRejectedError as rejected:
        assert rejected.code == "INVALID_JSON"
        return None
    try:
        parsed = deserialize_action(json.loads(request)["data"], action_class or Action)
    except ValidationError as error:
        WSErrorResponse(data={"errors": error.errors()}).model_dump_json()
        return None
    observation = asyncio.run(environment.step_async(parsed))
    frame = WSObservationResponse(data=serialize_observation(observation)).model_dump_json()
    assert len(frame) <= 2 * MAX_BYTES
    return step_result(parse_frame(frame, "the server")["data"], "the server")


FIELDS = {
    "blackjack": "action",
    "catch": "action",
    "echo": "message",
    "game2048": "action",
    "reasoning": "answer",
    "tic_tac_toe": "action",
    "wordle": "guess",
}


@pytest.mark.parametrize("name", FIELDS)
def test_any_text_is_an_answer_to_an_environment(name):
    environment, action_class = way(name)
    for text in TEXTS.values():
        environment.reset(seed=1)
        answered(environment, action_class, {FIELDS[name]: text})
        for wrong in (7, None, [text], {"a": text}, 10**400, True):
            answered(environment, action_class, {FIELDS[name]: wrong})
        answered(environment, action_class, {FIELDS[name]: "x", text: text})
    assert answered(environment, action_class, {FIELDS[name]: "x"}) is not None


def test_any_call_is_an_answer_to_the_email_search():
    environment, _ = way("email_search")
    for text in TEXTS.values():
        environment.reset(seed=1)
        for tool, arguments in (
            ("search", {"query": text}),
            ("search", {"query": "a", "limit": 10**400}),
            ("search", {"query": [text]}),
            ("read", {"message_id": text}),
            (text, {"query": text}),
            ("answer", {"text": text, "message_ids": [text] * 3}),
        ):
            answered(
                environment,
                None,
                {"type": "call_tool", "tool_name": tool, "arguments": arguments},
            )
    environment.reset(seed=1)
    call = {"type": "call_tool", "tool_name": "search", "arguments": {"query": "invoice"}}
    assert answered(environment, None, call) is not None


SUBMISSIONS = {  # FUNCTION is the name of the function to write
    "a message with half a pair": "def FUNCTION(*a): raise ValueError('\\ud800')",
    "a class with such a name": "class E(Exception): pass\nE.__name__ = 'x' * 10**5\n"
    "def FUNCTION(*a): raise E('\\udfff' * 10**5)",
    "while it is loaded": "raise ValueError('\\ud800\\x00\\x1b[2J')",
    "a result with half a pair": "def FUNCTION(*a): return '\\ud800'",
    "a deep result": "def FUNCTION(*a):\n x = []\n for _ in range(900): x = [x]\n return x",
    "a huge integer": "def FUNCTION(*a): return 10**4000",
    "an infinite number": "def FUNCTION(*a): return 1e999",
    "an exception without text": "class E(Exception):\n    def __str__(self): 1 / 0\n"
    "def FUNCTION(*a): raise E",
    "a violation of its own making": 'import os\nos.write(1, b\'{"violation": "\\\\ud800"}\\n\')',
    "a deep violation": "import os\n"
    'os.write(1, b\'{"violation": \' + b"[" * 700 + b"]" * 700 + b"}\\n")',
    "a violation with results": "import os\ndef FUNCTION(*a):\n"
    '    os.write(1, b\'{"results": [{"error": ["\\\\ud800", 7]}]}\\n\')',
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_any_program_is_an_attempt_at_coding(name):
    """The attempt counts, and a penalty with it."""
    environment, action_class = way("coding")
    environment.reset(index=0)
    function = environment._episode.problem.function
    code = SUBMISSIONS[name].replace("FUNCTION", function)
    result = answered(environment, action_class, {"code": code})
    assert result is not None
    assert result.observation["attempt"] == 1
    assert result.reward == -0.5 if "violation" in name else -0.1 <= result.reward < 0.5
    assert result.done == ("violation" in name)


def test_any_text_is_an_attempt_at_coding():
    environment, action_class = way("coding")
    for text in TEXTS.values():
        environment.reset(index=0)
        answered(environment, action_class, {"code": text})
