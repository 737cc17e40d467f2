"""The OpenEnv server of 2048."""
