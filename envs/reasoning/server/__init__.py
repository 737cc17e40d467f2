"""The OpenEnv server of Reasoning."""
