"""A vault whose code lies in one of six rooms: an environment with MCP tools, in full."""
