"""The check before an evaluation that a task begins the same each time it is reset."""

from itertools import count

import pytest
from fakes import FakeHost, rollout_context, run_config

from openenv_pipe.engines.base import StaticEngine
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import SessionClosedError
from openenv_pipe.pipeline.evaluate import task_warnings


async def warning(first_text):
    """The warnings about an environment whose reset number n shows `first_text(n, seed)`."""
    numbers = count()

    def play(seed, number, action):
        return StepResult({"text": first_text(next(numbers), seed)}, 0.0, done=False)

    host = FakeHost(play, capacity=1)
    found = await task_warnings(
        rollout_context(run_config(), host, chat=None, engine=StaticEngine())
    )
    assert next(numbers) <= 2
    return "".join(found)


async def test_a_task_that_begins_differently_each_time_is_named():
    text = await warning(lambda reset, seed: f"Guess the number {reset}.")
    assert "the task eval/0, reset twice with seed 0, began differently" in text


@pytest.mark.parametrize(
    "volatile", ["", "at 14:05:0{}", "id 1b4e28ba-2fa1-11d2-883f-0016d3cca42{}"]
)
async def test_a_task_that_its_seed_determines_is_not_mentioned(volatile):
    assert await warning(lambda reset, seed: f"Task {seed} {volatile.format(reset)}") == ""


async def test_a_reset_that_fails_is_left_to_the_evaluation():
    def fails(reset, seed):
        raise SessionClosedError("gone")

    assert await warning(fails) == ""
