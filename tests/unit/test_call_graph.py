"""Model calls, linked by their token ids, and their roles."""

import itertools
import random

import pytest
from fakes import made_up_episode, made_up_turn

from openenv_pipe.algorithms.call_graph import assign_roles, link_turns, place_call
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.types import TurnRole

AGENT, RETRY, AUXILIARY = TurnRole.AGENT, TurnRole.RETRY, TurnRole.AUXILIARY


def play(*calls):
    """Return the turns of calls, each a whole prompt and a completion, placed one by one."""
    turns = []
    for prompt, completion in calls:
        parent, new = place_call(turns, prompt)
        turns.append(made_up_turn(new, completion, parent=parent))
    return turns


@pytest.mark.parametrize(
    ("calls", "parents", "last_prompt"),
    [
        ([([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8])], [None, 0, 1], [7]),
        # A compaction keeps the system prompt [1, 2] and replaces what follows.
        ([([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 9], [7])], [None, 0, None], [1, 2, 9]),
        # The template drops the thought 50 of the second reply when the third prompt comes.
        ([([1], [2]), ([1, 2, 3], [50, 4]), ([1, 2, 3, 4, 5], [6])], [None, 0, 0], [3, 4, 5]),
        # The second prompt ends in a completion, and does not continue it.
        ([([1], [2, 3]), ([1, 2], [4]), ([1, 2, 3], [5])], [None, None, 0], []),
        # The second call repeats the first with a longer completion, and the longest is continued.
        (
            [([1], [2]), ([1], [2, 3]), ([1, 2, 3, 4], [5]), ([1, 2, 9], [6])],
            [None, None, 1, 0],
            [9],
        ),
        ([([1], [2]), ([1], [2]), ([1, 2, 3], [4])], [None, None, 1], [3]),
        # The agent starts two sub-agents, the first of them goes on, and the agent with its result.
        (
            [([1], [3]), ([8, 1], [4]), ([8, 2], [5]), ([8, 1, 4, 6], [7]), ([1, 3, 4, 5], [6])],
            [None, None, None, 1, 0],
            [4, 5],
        ),
    ],
    ids=["grows", "compaction", "dropped thought", "ends", "longest", "newest", "sub-agents"],
)
def test_a_call_continues_the_longest_context_that_its_prompt_begins_with(
    calls, parents, last_prompt
):
    turns = play(*calls)
    assert [turn.parent for turn in turns] == parents
    assert turns[-1].prompt_ids == last_prompt


def test_the_order_in_which_calls_are_recorded_has_no_effect():
    calls = [
        ([1, 2], [3]),
        ([1, 2, 3, 4], [5, 6]),
        ([1, 2, 3, 4, 5, 6, 7], [8]),
        ([1, 2, 3, 4], [9]),
        ([7], [7]),
    ]
    for order in itertools.permutations(range(len(calls))):
        turns = [made_up_turn(*calls[number]) for number in order]
        link_turns(turns)
        for place, number in enumerate(order):
            parent = turns[place].parent
            expected = {0: None, 1: 0, 2: 1, 3: 0, 4: None}[number]
            assert (None if parent is None else order[parent]) == expected
        assert sum(len(turn.prompt_ids) for turn in turns) == 6


def test_nothing_of_a_prompt_is_lost():
    draw = random.Random(0)
    for _ in range(200):
        calls = []
        for _ in range(8):
            before = draw.choice(calls) if calls else ([], [])
            start = [*before[0], *before[1]][: draw.randrange(8)]
            calls.append(([*start, draw.randrange(3)], [draw.randrange(3)]))
        turns = play(*calls)
        episode = made_up_episode(turns=turns)
        for path in episode.branches:
            whole, chosen = calls[path[-1]]
            ids = [
                id
                for place in path
                for id in [*turns[place].prompt_ids, *turns[place].completion_ids]
            ]
            assert ids == [*whole, *chosen]


# --- roles --------------------------------------------------------------------------------------


def roles_of(turns, has_tools=None):
    assign_roles(turns, has_tools or [True] * len(turns))
    return [turn.role for turn in turns]


@pytest.mark.parametrize("repeated", [[1], [1, 2, 3]], ids=["root", "later"])
def test_a_call_that_was_repeated_and_never_continued_is_a_retry(repeated):
    calls = [([1], [2])] if repeated != [1] else []
    calls += [(repeated, [7]), (repeated, [8]), ([*repeated, 8, 9], [10])]
    assert roles_of(play(*calls))[-3:] == [RETRY, AGENT, AGENT]


@pytest.mark.parametrize(
    "calls",
    [
        [([1], [2]), ([1], [3])],  # all of them ended
        [([1], [2]), ([1, 2, 3], [4]), ([8], [5])],  # a sub-agent that answers at once
        # The template dropped the thought 50 later.
        [([1], [2]), ([1, 2, 3], [50, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5, 6, 7], [8])],
    ],
)
def test_what_is_no_retry(calls):
    assert roles_of(play(*calls)) == [AGENT] * len(calls)


def test_calls_without_tools_are_auxiliary_where_others_have_tools():
    turns = play(([1], [2]), ([9], [4]), ([9, 4, 5], [6]), ([1, 2, 3], [4]))
    assert roles_of(turns, [True, False, False, True]) == [AGENT, AUXILIARY, AUXILIARY, AGENT]
    assert roles_of(turns, [False] * 4) == [AGENT] * 4


def test_a_path_with_tools_is_the_agents_to_its_end():
    turns = play(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    assert roles_of(turns, [False, True, False]) == [AGENT] * 3


def test_a_program_with_everything():
    """A sub-agent, a retry, a compaction, a title and a parallel tool call, as samples."""
    turns = play(
        ([90, 1], [91]),  # the title
        ([1, 2], [3, 4]),  # the agent asks for two tools at once
        ([1, 2, 3, 4, 5, 6], [7]),  # with both results: cannot be parsed
        ([1, 2, 3, 4, 5, 6], [8]),  # again
        ([70, 1], [71]),  # the sub-agent that it asked for
        ([70, 1, 71, 72], [73]),
        ([1, 2, 3, 4, 5, 6, 8, 73], [9]),
        ([1, 60], [61]),  # the agent after a compaction
    )
    assert roles_of(turns, [False] + [True] * 7) == [AUXILIARY, AGENT, RETRY, *[AGENT] * 5]
    samples = episode_samples("g", made_up_episode(turns=turns), [1.0] * 8)
    shown = [
        [-id if chosen else id for id, chosen in zip(s.token_ids, s.loss_mask, strict=True)]
        for s in samples
    ]
    assert shown == [
        [70, 1, -71, 72, -73],
        [1, 2, -3, -4, 5, 6, -8, 73, -9],
        [1, 60, -61],
    ]
