"""Link model calls to a graph by their exact token ids, and tell the agent's from others.

A call continues the turn whose whole context and completion are the longest prefix of its prompt.
Nothing is rendered, tokenised or compared loosely: a history that a program or a chat template has
changed was another sequence to the model, and therefore begins a root. Links and roles are those of
OpenEnv's RFC 006.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from openenv_pipe.types import Turn, TurnRole, path_to

Children = dict[int | None, list[int]]  # the turns that continue a turn; of None, the roots


def place_call(turns: Sequence[Turn], prompt_ids: Sequence[int]) -> tuple[int | None, list[int]]:
    """Find the turn that a call continues, and the token ids that are new in the call.

    Among turns with equal contexts and completions, the call continues the last.

    turns: placed already, each with an explicit parent
    prompt_ids: the whole prompt of the call

    Returns the parent's index and what follows its completion; for a root, None and all ids.
    """
    return _place(turns, _children(turns), list(prompt_ids))


def link_turns(turns: Sequence[Turn]) -> None:
    """Set the parents of turns that have their whole prompts, which become what is new in each.

    The order of the turns has no effect, because calls that are sent at the same time may be
    recorded in any order: a call may come before the one that it continues.
    """
    children: Children = defaultdict(list)
    # What a call continues is shorter than its prompt.
    for index in sorted(range(len(turns)), key=lambda index: len(turns[index].prompt_ids)):
        turn = turns[index]
        turn.parent, turn.prompt_ids = _place(turns, children, turn.prompt_ids)
        children[turn.parent].append(index)


def assign_roles(turns: Sequence[Turn], has_tools: Sequence[bool]) -> None:
    """Set the roles of an episode's turns, once it has ended.

    A turn that no other continues is a RETRY if one with the same prompt was continued. If a call
    of the episode has tools, a turn is AUXILIARY if no turn on any path through it has. All others
    are the AGENT's.

    turns: each with an explicit parent
    has_tools: whether the call of each turn had tools
    """
    children, parents = _children(turns), [turn.parent for turn in turns]
    retries = set()
    for siblings in _siblings(turns, children):
        ended = [index for index in siblings if not children[index]]
        if len(ended) < len(siblings):
            retries.update(ended)
    on_paths_with_tools: set[int] = set()
    for index in range(len(turns)):
        if not children[index]:
            path = path_to(index, parents)
            if any(has_tools[place] for place in path):
                on_paths_with_tools.update(path)
    for index, turn in enumerate(turns):
        if index in retries:
            turn.role = TurnRole.RETRY
        elif on_paths_with_tools and index not in on_paths_with_tools:
            turn.role = TurnRole.AUXILIARY
        else:
            turn.role = TurnRole.AGENT


def _siblings(turns: Sequence[Turn], children: Children) -> list[list[int]]:
    """Return groups of turns that continue the same turn with equal prompts.

    With other prompts, they are no repetitions: a sub-agent may have answered at once, and a
    template may have dropped a thought.
    """
    groups = []
    for found in children.values():
        found = sorted(found, key=lambda index: turns[index].prompt_ids)
        groups += [list(group) for _, group in groupby(found, lambda i: turns[i].prompt_ids)]
    return groups


def _children(turns: Sequence[Turn]) -> Children:
    children: Children = defaultdict(list)
    for index, turn in enumerate(turns):
        children[turn.parent].append(index)
    return children


def _place(
    turns: Sequence[Turn], children: Children, prompt: list[int]
) -> tuple[int | None, list[int]]:
    found, found_end = None, 0
    ahead = [(root, 0) for root in children[None]]
    while ahead:
        index, start = ahead.pop()
        end = _end_of_match(turns[index], prompt, start)
        if end is None:
            continue
        if end > found_end or (found is not None and end == found_end and index > found):
            found, found_end = index, end
        ahead += [(child, end) for child in children[index]]
    return found, prompt[found_end:]


def _end_of_match(turn: Turn, prompt: list[int], start: int) -> int | None:
    """Return where a turn ends in a prompt whose first `start` tokens are its context."""
    middle = start + len(turn.prompt_ids)
    end = middle + len(turn.completion_ids)
    if end > len(prompt) or (turn.completion_ids and prompt[end - 1] != turn.completion_ids[-1]):
        return None  # The last token alone excludes most turns.
    if prompt[start:middle] == turn.prompt_ids and prompt[middle:end] == turn.completion_ids:
        return end
    return None
