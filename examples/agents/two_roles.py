"""An agent of two roles, in OpenAI's client: `openenv-pipe train conf=two_roles` trains both.

It plays the echo environment: a planner notes the letter, and a writer, who sees only the note,
writes it, both by a tool. Nothing in it knows that it is being trained.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from openai import OpenAI

SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Write a message.",
        "parameters": {"type": "object", "properties": {"message": {"type": "string"}}},
    },
}


def main() -> None:
    client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
    task = json.loads(Path(os.environ["OPENENV_TASK_FILE"]).read_text())
    letter = task["observation"]["letter"]
    planner, writer = Role("plan", client), Role("write", client)
    done = False
    while not done:
        note = planner.ask(letter)[:1] or "?"
        observation, done = step(writer.ask(note))
        letter = observation["letter"]


class Role:
    """A conversation in which the model answers by calls of the tool."""

    def __init__(self, name: str, client: OpenAI) -> None:
        self._name = name
        self._client = client
        self._messages: list[dict[str, Any]] = []
        self._call_id: str | None = None  # of a call without a result

    def ask(self, letter: str) -> str:
        """Return what the model says by its tool; empty if it makes no call."""
        content = f"{self._name} {letter}"
        if self._call_id is None:
            self._messages.append({"role": "user", "content": content})
        else:  # the next letter is the call's result
            result = {"role": "tool", "tool_call_id": self._call_id, "content": content}
            self._messages.append(result)
        answer = self._client.chat.completions.create(
            model="policy", messages=self._messages, tools=[SAY]
        )
        message = answer.choices[0].message
        self._messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            self._call_id = None
            return ""
        call = message.tool_calls[0]
        self._call_id = call.id
        return str(json.loads(call.function.arguments).get("message", ""))


def step(message: str) -> tuple[dict[str, str], bool]:
    """Send a message to the environment of this episode."""
    request = Request(
        os.environ["OPENENV_URL"] + "/step",
        json.dumps({"action": {"message": message}}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        result = json.load(response)
    return result["observation"], result["done"]


if __name__ == "__main__":
    main()
