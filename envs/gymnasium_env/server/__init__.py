"""The OpenEnv server of Gymnasium's environments."""
