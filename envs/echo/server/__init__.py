"""The OpenEnv server of Echo."""
