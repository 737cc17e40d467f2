"""Blackjack for OpenEnv: hit or stand against a dealer. The game is OpenSpiel's own.

Nothing is imported here, so that `blackjack.policies` can be used without loading the `openenv`
library, which takes seconds. Import the rest directly: `blackjack.client.BlackjackEnv`,
`blackjack.game`, `blackjack.models`, `blackjack.tasks`, `blackjack.server.app`.
"""
