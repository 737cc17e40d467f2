"""The OpenEnv server of proposer and solver."""
