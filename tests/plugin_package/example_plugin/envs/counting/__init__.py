"""Counting for OpenEnv: the next number."""
