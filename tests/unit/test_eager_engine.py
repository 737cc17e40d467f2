"""The local engine for clients that come and go, with a real tiny model."""

import asyncio
from concurrent.futures import Executor, Future

import pytest
from fakes import local_engine, tiny_policy

from openenv_pipe.engines.base import TokenRequest, turn_seed
from openenv_pipe.engines.eager import EagerEngine

PROMPT = [5, 6, 7, 8]


class HeldExecutor(Executor):
    """Runs a function when the test says so, and counts the requests of each batch."""

    def __init__(self):
        self.batch_sizes = []
        self._held = []

    def submit(self, function, /, *args):
        future = Future()
        self.batch_sizes.append(len(args[0]))
        self._held.append((future, function, args))
        return future

    def run_next(self):
        future, function, args = self._held.pop(0)
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)


def request(episode, *, turn=0, prompt_ids=PROMPT, seed=3):
    return TokenRequest(
        episode=episode,
        turn=turn,
        prompt_ids=prompt_ids,
        max_tokens=6,
        temperature=1.0,
        seed=seed,
    )


async def begin(engine, *requests):
    """Ask for completions, and let the tasks come as far as they come."""
    tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
    await settle()
    return tasks


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def executor():
    return HeldExecutor()


@pytest.fixture
def engine(executor):
    return EagerEngine(tiny_policy(), max_episodes=4, executor=executor)


async def test_those_that_come_while_a_batch_is_sampled_are_the_next_batch(engine, executor):
    tasks = await begin(engine, request(0))
    tasks += await begin(engine, *(request(number) for number in range(1, 7)))
    for _ in range(3):
        executor.run_next()
        await settle()
    assert executor.batch_sizes == [1, 4, 2]
    assert all(task.done() for task in tasks)


async def test_a_request_whose_player_left_is_not_sampled(engine, executor):
    tasks = await begin(engine, *(request(number) for number in range(3)))
    tasks[1].cancel()
    await settle()
    executor.run_next()
    await settle()
    executor.run_next()
    await tasks[2]
    assert executor.batch_sizes == [1, 1]


async def test_each_turn_is_what_the_local_engine_samples_for_the_whole_prompt(engine, executor):
    """Also for requests of one episode that are in one batch."""
    prompts = [PROMPT, [*PROMPT, 9], PROMPT[:2], [*PROMPT, 9]]
    tasks = await begin(
        engine, *(request(0, turn=turn, prompt_ids=ids) for turn, ids in enumerate(prompts))
    )
    executor.run_next()
    await settle()
    executor.run_next()
    assert executor.batch_sizes == [1, 3]
    for turn, ids in enumerate(prompts):
        completion = await tasks[turn]
        alone = local_engine(tiny_policy())
        alone.begin_rollouts(1, 1)
        expected = await alone.generate(request(0, prompt_ids=ids, seed=turn_seed(3, turn)))
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_an_error_of_a_batch_reaches_its_episodes_and_no_others(engine, executor):
    (bad,) = await begin(engine, request(0, prompt_ids=[10**9]))
    (good,) = await begin(engine, request(1))
    executor.run_next()
    with pytest.raises(IndexError):
        await bad
    executor.run_next()
    assert (await good).token_ids
