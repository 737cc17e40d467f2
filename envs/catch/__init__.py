"""Catch for OpenEnv: move a paddle under a falling ball. The game is OpenSpiel's own.

Nothing is imported here, so that `catch.policies` and `catch.rewards` can be used without loading
the `openenv` library, which takes seconds. Import the rest directly: `catch.client.CatchEnv`,
`catch.game`, `catch.models`, `catch.tasks`, `catch.server.app`.
"""
