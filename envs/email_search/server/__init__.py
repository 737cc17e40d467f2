"""The OpenEnv server of email search."""
