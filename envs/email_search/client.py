"""A typed client on OpenEnv's own for MCP environments: for notebooks and scripts."""

from openenv.core.mcp_client import MCPToolClient


class EmailSearchEnv(MCPToolClient):
    """One episode at a time; for rewards, step with a `CallToolAction`.

    >>> from openenv.core.env_server.mcp_types import CallToolAction
    >>> with EmailSearchEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     question = env.reset(split="train", index=0).observation.question
    ...     result = env.step(CallToolAction(tool_name="search", arguments={"query": question}))
    ...     print(result.observation.result["data"])
    """
