"""Episodes that checks and people play: they are those of training, step for step."""

import asyncio
import random

import pytest
from anyio.from_thread import start_blocking_portal
from fakes import FakeHost, run_config

from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import StepRejectedError
from openenv_pipe.extras.lab.episodes import play_to_end
from openenv_pipe.extras.lab.play import ShownAdapter, play_by_hand
from openenv_pipe.types import Status, Task

CONFIG = run_config()
TASK = Task(id="train/0", split="train", index=0, seed=0)


def picky(seed, number, action):
    """Rejects "bad", and is done with "end"."""
    if action.get("text") == "bad":
        raise StepRejectedError("VALIDATION_ERROR", "bad is not allowed")
    return StepResult({"text": f"seen {number}"}, 0.5, done=action.get("text") == "end")


def chosen_play(*turns: list[str]) -> PlayedEpisode:
    """Return the play of these actions, turn by turn; after them there is no action."""
    left = iter(turns)

    def choose(observations, draw):
        return [{"text": text} for text in next(left, [])]

    async def play():
        record = PlayedEpisode(task=TASK)
        async with FakeHost(picky).session() as session:
            await play_to_end(session, record, choose, CONFIG.env, random.Random(0))
        return record

    return asyncio.run(play())


def test_the_calls_behind_a_rejected_one_are_not_made():
    play = chosen_play(["a", "bad", "b"], ["c", "end", "d"])
    assert [action["text"] for action in play.actions] == ["a", "c", "end"]
    assert [str(rejection) for rejection in play.rejections] == [
        "VALIDATION_ERROR: bad is not allowed"
    ]
    assert play.done and play.failure is None and play.num_turns == 4
    assert len(play.durations_s) == len(play.results) == 4


def test_a_reward_of_the_reset_does_not_count_as_in_training():
    results = [StepResult({}, 5.0, done=False), StepResult({}, 1.0, done=True)]
    assert PlayedEpisode(task=TASK, results=results).reward == 1.0


class Answering:
    """The text adapter, except that the reply "answer" has no action."""

    def __init__(self):
        adapter = build_adapter(CONFIG.env.adapter)
        self.open, self.follow, self.reject = adapter.open, adapter.follow, adapter.reject
        self._read = adapter.read

    def read(self, reply):
        return [] if reply == "answer" else self._read(reply)


class Typist:
    """Types the replies, and then ends the input."""

    def __init__(self, *replies):
        self.shown = []
        self._replies = list(replies)

    def show(self, text, kind):
        self.shown.append(text)

    def reply(self):
        if not self._replies:
            raise EOFError
        return self._replies.pop(0)


@pytest.mark.parametrize(
    ("replies", "status", "end"),
    [
        (["a", "end"], Status.DONE, "done after 2 turns, with reward 1 in all"),
        (["a", "answer"], Status.ANSWERED, "ended by an answer after 2 turns, with reward 0.5 in"),
        (["a", "bad"], Status.TURN_LIMIT, "stopped before the end, with reward 0.5 in all"),
        (["a"] * 4, Status.TURN_LIMIT, "ended by env.max_turns=4, with reward 2 in all"),
    ],
)
def test_a_person_plays_the_episode_of_training(replies, status, end):
    person = Typist(*replies)
    shown = ShownAdapter(Answering(), person, raw=False)
    with start_blocking_portal() as portal:
        episode = play_by_hand(portal, FakeHost(picky), shown, CONFIG.env, TASK)
    assert episode.status is status
    assert [turn.reply for turn in episode.turns] == replies
    assert person.shown[-1].strip().startswith(end)
    assert ("? VALIDATION_ERROR: bad is not allowed" in person.shown) is ("bad" in replies)
    assert person.shown.count("reward 0.5") == sum(len(turn.steps) for turn in episode.turns)
