"""An agent of OpenAI's Agents SDK, by the Responses interface; conf/agent/openai_agents.yaml.

The environment's tools come by MCP. The SDK's traces stay off, because they would go to OpenAI.
"""

import asyncio
import json
import os
from pathlib import Path

from agents import Agent, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.mcp import MCPServerStreamableHttp


async def main() -> None:
    set_tracing_disabled(True)
    task = json.loads(Path(os.environ["OPENENV_TASK_FILE"]).read_text())
    prompt = "\n\n".join(message["content"] for message in task["messages"])
    server = MCPServerStreamableHttp({"url": os.environ["OPENENV_URL"] + "/mcp"})
    async with server:
        agent = Agent(
            name="coder",
            instructions="Hand in your answer with the tool.",
            model=os.environ["OPENENV_MODEL"],
            mcp_servers=[server],
        )
        try:
            result = await Runner.run(agent, prompt, max_turns=10)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            # What the model did wrong is the episode's outcome, not a failure of this program.
            print(f"{type(error).__name__}: {error}")
        else:
            print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
