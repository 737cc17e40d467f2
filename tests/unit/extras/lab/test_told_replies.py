"""Answers that observations tell are found by the replies of an expert."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_env_probes import group, played

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.extras.lab.check.leaks import expert_line, leak_lines, told_line


def stocked(message: str) -> list[PlayedEpisode]:
    """Return the episodes of an expert that orders what is missing on a shelf, twice."""
    plays = []
    for number in range(12):
        pairs = [(number % 3, number % 3 + 1 + number % 4), (1, 2 + (number + 1) % 5)]
        seen = [
            {"shelf": f"{have}/{need}", "turn": turn, "note": message.format(need - have)}
            for turn, (have, need) in enumerate(pairs)
        ]
        play = played(*seen, {"shelf": ""})
        play.actions = [{"answer": str(need - have)} for have, need in pairs]
        plays.append(play)
    return plays


def test_an_answer_that_each_observation_tells_is_found_by_an_experts_replies():
    """Digits also stand in other fields by chance."""
    line = told_line(stocked("how many? (debug target={})"), "env.baselines.expert")
    assert (line.name, line.result) == ("leaks, expert", Result.WARN)
    assert "observation.note shows the `answer` of env.baselines.expert" in line.text
    assert line.measured["share"] == 1.0
    clean = told_line(stocked("how many?"), "env.baselines.expert")
    assert clean.result is Result.OK
    assert told_line(stocked("{}")[:2], "me") is None, "too few replies"
    nothing_revealed = [played({"text": "go"}, {"text": "end"})]
    assert list(leak_lines(nothing_revealed, clean)) == [clean]
    listed = played({"choices": "1 2 3 4"}, {})
    moves = [replace(listed, actions=[{"move": 1 + number % 4}]) for number in range(12)]
    assert told_line(moves, "me").result is Result.OK, "all legal moves are listed"


@pytest.mark.parametrize(
    ("draws", "pays", "adapter", "is_searched"),
    [
        (False, 1.0, "text", True),
        (True, 1.0, "text", False),
        (False, 0.2, "text", False),
        (False, 1.0, "tool", False),
    ],
)
def test_only_an_expert_worth_its_name_is_searched_for(draws, pays, adapter, is_searched):
    async def expert():
        return "env.baselines.expert", None

    async def play(session, index, chooser, *, member):
        found = replace(stocked("target={}")[index % 12])
        found.results = [*found.results[:-1], StepResult({}, pays, done=True)]
        if draws and member:
            found.actions = [{"answer": "other"}, *found.actions[1:]]
        return found

    async def spread(work, do, **limits):
        for item in work:
            await do(None, item)

    subject = SimpleNamespace(
        env=SimpleNamespace(adapter=SimpleNamespace(type=adapter), success_reward=1.0),
        expert=expert,
        play=play,
        spread=spread,
        tasks=range(16),
        num_sessions=1,
    )
    line = asyncio.run(expert_line(subject, [group(0.0, 0.1)]))
    assert (line is not None) is is_searched
