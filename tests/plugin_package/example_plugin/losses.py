"""A policy loss."""


def reinforce(tokens, *, scale=1.0):
    """REINFORCE: the log-likelihood of each token, weighted by its advantage. Shape [N]."""
    return -scale * tokens.advantages * tokens.logprobs
