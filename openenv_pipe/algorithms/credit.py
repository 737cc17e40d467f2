"""Which turns of an episode are trained, and what each of them is credited with."""

from openenv_pipe.types import Episode, TurnRole


def trained_turns(episode: Episode) -> list[int]:
    """Return the indices of the turns that the loss covers: those of the agent that have tokens."""
    return [
        index
        for index, turn in enumerate(episode.turns)
        if turn.role is TurnRole.AGENT and turn.completion_ids
    ]


def trained_turn_rewards(episode: Episode) -> list[float]:
    """Return the per-turn rewards with those of untrained turns moved to trained ones.

    A reward moves to the last trained turn before it, or else to the first one after it, so that
    the trained turns together are credited with all of it. Without trained turns, nothing moves.
    """
    trained = trained_turns(episode)
    if not trained:
        return list(episode.turn_rewards)
    moved, to = [0.0] * len(episode.turn_rewards), trained[0]
    for index, reward in enumerate(episode.turn_rewards):
        if index in trained[1:]:
            to = index
        moved[to] += reward
    return moved
