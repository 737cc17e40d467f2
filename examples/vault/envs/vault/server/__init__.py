"""The OpenEnv server of the vault."""
