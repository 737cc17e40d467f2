"""Advantages."""


def against_the_best(groups, *, bonus=0.0):
    """How far each episode is behind the best one of its group, the same for all its turns."""
    advantages = []
    for group in groups:
        best = max((episode.reward for episode in group.scored), default=0.0)
        gaps = [episode.reward - best + bonus for episode in group.scored]
        episodes = zip(group.scored, gaps, strict=True)
        advantages.append([[gap] * len(episode.turns) for episode, gap in episodes])
    return advantages
