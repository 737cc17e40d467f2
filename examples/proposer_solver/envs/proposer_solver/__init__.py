"""A game of a proposer, who writes a word, and a solver, who writes it backwards."""
