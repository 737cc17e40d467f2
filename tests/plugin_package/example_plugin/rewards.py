"""A reward term."""


def brief(episode, *, max_characters):
    """1.0 for each reply that is short enough: one number per turn."""
    return [float(len(turn.reply) <= max_characters) for turn in episode.turns]
