"""The OpenEnv server of Coding."""
