"""An agent of smolagents that calls tools, by chat completions: conf/agent/smolagents.yaml runs it.

It writes Python for the environment `coding`.
"""

import json
import os
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def hand_in(code: str) -> str:
    """Run the tests on a function.

    Args:
        code: The function, as Python code.
    """
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


def main() -> None:
    task = json.loads(Path(os.environ["OPENENV_TASK_FILE"]).read_text())
    model = OpenAIModel(
        model_id=os.environ["OPENENV_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = ToolCallingAgent(tools=[hand_in], model=model, max_steps=8)
    print(agent.run("\n\n".join(message["content"] for message in task["messages"])))


if __name__ == "__main__":
    main()
