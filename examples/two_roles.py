"""An agent of two roles, in OpenAI's client: `train_program.py` trains both.

It plays the echo environment: a planner notes what has to be written, a writer writes it, by a tool
if the model can call one. Nothing in it knows that it is being trained.
"""

import json
import os
from pathlib import Path
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
    done = False
    while not done:
        note = ask(client, "plan", letter)[:1]
        observation, done = step(ask(client, "write", f"{letter} {note}"))
        letter = observation["letter"]


def ask(client: OpenAI, role: str, text: str) -> str:
    """Return what one role answers, or says by its tool."""
    messages = [{"role": "system", "content": role}, {"role": "user", "content": text}]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[SAY])
    message = answer.choices[0].message
    for call in message.tool_calls or ():
        return str(json.loads(call.function.arguments).get("message", ""))
    return message.content or ""


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
