"""Coding for OpenEnv: write a small Python function that passes hidden tests.

Nothing is imported here, so that `coding.problems`, `coding.sandbox` and `coding.policies` can be
used without loading the `openenv` library, which takes seconds. Import the rest directly:
`coding.client.CodingEnv`, `coding.models`, `coding.server.app`.
"""
