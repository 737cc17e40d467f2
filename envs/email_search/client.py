"""A typed client for notebooks and scripts, built on OpenEnv's client for MCP environments."""

from openenv.core.mcp_client import MCPToolClient


class EmailSearchEnv(MCPToolClient):
    """Plays one episode at a time; steps with a `CallToolAction` return rewards.

    >>> from openenv.core.env_server.mcp_types import CallToolAction
    >>> with EmailSearchEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     question = env.reset(split="train", index=0).observation.question
    ...     result = env.step(CallToolAction(tool_name="search", arguments={"query": question}))
    ...     print(result.observation.result["data"])
    """
