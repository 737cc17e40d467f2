"""A graph of LangGraph, trained from where it runs: it plays the echo environment of the server.

Needs `pip install langgraph langchain-openai`. Start the server first:
`openenv-pipe serve --train conf=echo`.
"""

import asyncio
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from openenv_pipe.client import AsyncClient, AsyncRollout, TrainingEndedError

NUM_AT_ONCE = 4


async def play(rollout: AsyncRollout) -> None:
    """Play one episode: a node asks the model, the next one takes the step."""
    model = ChatOpenAI(model=rollout.model, base_url=rollout.base_url, api_key=rollout.api_key)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def act(state: MessagesState) -> dict[str, Any]:
        result = await rollout.step({"message": state["messages"][-1].text})
        if result.done:
            return {"messages": []}
        return {"messages": [{"role": "user", "content": result.observation["letter"]}]}

    def is_over(state: MessagesState) -> str:
        return END if state["messages"][-1].type == "ai" else "ask"

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("act", act)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "act")
    graph.add_conditional_edges("act", is_over)
    await graph.compile().ainvoke({"messages": rollout.task["messages"]}, {"recursion_limit": 100})
    await rollout.finish()


async def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    async with AsyncClient(url) as client:

        async def play_all() -> int:
            num_played = 0
            while True:
                try:
                    async with client.rollout() as rollout:
                        await play(rollout)
                except TrainingEndedError:
                    return num_played
                num_played += 1

        print(f"played {sum(await asyncio.gather(*(play_all() for _ in range(NUM_AT_ONCE))))}")


if __name__ == "__main__":
    asyncio.run(main())
