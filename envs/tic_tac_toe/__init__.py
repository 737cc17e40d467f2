"""Tic-tac-toe for OpenEnv: two players, three in a row.

Nothing is imported here, so that `tic_tac_toe.rules` and `tic_tac_toe.policies` can be used without
loading the `openenv` library, which takes seconds. Import the rest directly:
`tic_tac_toe.client.TicTacToeEnv`, `tic_tac_toe.game`, `tic_tac_toe.models`, `tic_tac_toe.tasks`,
`tic_tac_toe.server.app`.
"""
