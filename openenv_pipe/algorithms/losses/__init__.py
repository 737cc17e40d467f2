"""Losses over the tokens that the model chose. Shape letter: N trained tokens of a batch.

    policy        the clipped and weighted policy losses, by their names in the literature
    corrections   weights for tokens that were sampled by something other than the old policy
    divergence    estimators of the KL divergence to a reference
    normalising   what a loss is a mean over

Functions see trained tokens only, in one row, each with the number of the sample that it belongs
to: what is not trained cannot leak into a loss, not even as 0 * NaN, and neither padding nor
packing is known here. Of a token there are up to four logprobs:

    sampled     the sampler's, of the weights and kernels that it had
    old         those that a ratio is taken to: the trainer's own when the step began, or `sampled`
    (current)   the trainer's now; the only ones with a gradient
    reference   of the policy that the KL divergence is measured to
"""
