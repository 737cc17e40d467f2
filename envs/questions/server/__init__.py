"""The OpenEnv server of Questions."""
