"""Losses over the tokens that the model chose. Shape letter: N trained tokens of a batch.

    policy               clipped and weighted policy losses, by their names in the literature
    custom               a policy loss from another package
    importance_weights   weights for tokens that a policy other than the old one sampled
    kl                   estimators of the KL divergence to a reference
    normalization        the mean that a loss takes over tokens and episodes
    ratios               probability ratios, which the others share

Functions take trained tokens only, in one row, each with the index of its sample. Untrained tokens
therefore cannot leak into a loss, not even as 0 * NaN. A token has up to four logprobs:

    sampled     the sampler's, with its weights and kernels
    old         the denominator of a ratio: the trainer's when the step began, or `sampled`
    (current)   the trainer's now, the only ones with a gradient
    reference   those of the policy to which the KL divergence is measured
"""
