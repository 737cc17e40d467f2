"""An agent of smolagents that calls tools, by chat completions: conf/agent/smolagents.yaml runs it.

It writes Python for the environment `coding`.
"""

import json
import os
from pathlib import Path

from coding_step import run_tests
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def hand_in(code: str) -> str:
    """Run the tests on a function.

    Args:
        code: The function, as Python code.
    """
    return run_tests(code)


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
