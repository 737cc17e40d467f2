"""The OpenEnv server of Catch."""
