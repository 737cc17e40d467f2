"""Echo for OpenEnv: write the letter that is asked for.

Nothing is imported here, so that `echo.rules` and `echo.policies` can be used without loading
the `openenv` library, which takes seconds. Import the rest directly:
`echo.client.EchoEnv`, `echo.models`, `echo.server.app`.
"""
