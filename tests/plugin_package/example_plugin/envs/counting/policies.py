"""A scripted policy, for the baseline."""


def next_number(observations, rng):
    """The right answer: earns 1.0."""
    return str(observations[-1]["number"] + 1)
