"""The OpenEnv server of tic-tac-toe."""
