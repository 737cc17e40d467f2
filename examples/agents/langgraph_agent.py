"""A graph of LangGraph with LangChain's OpenAI client: conf/agent/langgraph.yaml runs it.

It writes Python for the environment `coding`: a node for the model, and one for its tool.
"""

import json
import os
from pathlib import Path
from typing import Any

from coding_step import run_tests
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def hand_in(code: str) -> str:
    """Run the tests on a function, given as Python code."""
    return run_tests(code)


def main() -> None:
    task = json.loads(Path(os.environ["OPENENV_TASK_FILE"]).read_text())
    model = ChatOpenAI(model=os.environ["OPENENV_MODEL"]).bind_tools([hand_in])

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([hand_in], handle_tool_errors=True))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    try:
        state = graph.compile().invoke({"messages": task["messages"]}, {"recursion_limit": 20})
    except GraphRecursionError as error:
        print(error)
    else:
        print(state["messages"][-1].content)


if __name__ == "__main__":
    main()
