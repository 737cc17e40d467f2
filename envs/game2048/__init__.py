"""2048 for OpenEnv: slide tiles, merge equal ones.

Nothing is imported here, so that `game2048.rules` and `game2048.policies` can be used without
loading the `openenv` library, which takes seconds. Import the rest directly:
`game2048.client.Game2048Env`, `game2048.game`, `game2048.models`, `game2048.tasks`,
`game2048.server.app`.
"""
