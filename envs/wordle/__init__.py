"""Wordle for OpenEnv: six guesses at a five-letter word.

Nothing is imported here, so that `wordle.rules`, `wordle.words`, `wordle.policies` and
`wordle.rewards` can be used without loading the `openenv` library, which takes seconds.
Import the rest directly: `wordle.client.WordleEnv`, `wordle.models`, `wordle.server.app`.
"""
