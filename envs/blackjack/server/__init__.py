"""The OpenEnv server of Blackjack."""
