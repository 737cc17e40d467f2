"""The OpenEnv server of Wordle."""
