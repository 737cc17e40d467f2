"""What `env check` concludes when it plays the answers that tasks come with."""

import pytest

from openenv_pipe.commands.findings import Result
from openenv_pipe.extras.lab.check.answers import (
    AnsweredTask,
    frequent_line,
    own_answer,
    own_line,
    repeated_line,
    wrong_line,
)
from openenv_pipe.types import Task


def answered(*rewards, answer="41"):
    return [
        AnsweredTask(
            task=Task(id=f"train/{index}", split="train", index=index, seed=0),
            answer=answer,
            reward=reward,
            why="" if reward is not None else "fails: no such function",
        )
        for index, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("reset", "answer"),
    [
        ({"question": "?", "answer": 7}, "7"),
        ({"answer": True}, "true"),
        ({"answer": "7", "solution": "3 + 4 = 7"}, "7"),
        ({"solution": "7"}, "7"),
        ({"solution": "7", "secret": "8"}, None),
        ({"answer": 1, "choices": ["4", "5"]}, "5"),
        ({"answer": 5, "choices": ["4", "5"]}, "5"),
        ({"answer": ["7"]}, None),
        ({"question": "?"}, None),
    ],
)
def test_the_answer_that_a_task_comes_with(reset, answer):
    task = Task(id="train/0", split="train", index=0, seed=0, reset=reset)
    assert own_answer(task, "answer") == answer


def test_own_answers_earn_the_full_reward():
    line = own_line(answered(1.0, 1.0), 1.0)
    assert (line.result, line.measured) == (Result.OK, {"tasks": 2, "full": 2})


def test_an_own_answer_that_earns_less_or_fails_is_named():
    line = own_line(answered(1.0, 0.5, None, 0.0, 0.0), 1.0)
    assert line.result is Result.FAIL
    assert "in 4 of 5 tasks" in line.text
    assert "train/1 with '41' earns 0.5, train/2 with '41' fails: no such function" in line.text
    assert "and 1 more" in line.text


@pytest.mark.parametrize(
    ("num_accepted", "empty", "result"),
    [(0, 0.0, Result.OK), (1, 0.0, Result.WARN), (3, 0.0, Result.FAIL), (0, 1.0, Result.FAIL)],
)
def test_wrong_answers_must_not_earn_the_full_reward(num_accepted, empty, result):
    wrong = answered(*[1.0] * num_accepted, *[0.9] * (20 - num_accepted))
    line = wrong_line(wrong, answered(*[0.0] * 19, empty, answer=""), 1.0)
    assert line.result is result
    assert line.measured == {"tasks": 20, "others": num_accepted, "empty": empty}


def test_wrong_answers_must_have_a_reward():
    line = wrong_line(answered(0.0, 0.0), answered(0.0, None, answer=""), 1.0)
    assert line.result is Result.FAIL
    assert "1 of 4 wrong and empty answers have no reward: train/1 with '' fails" in line.text


def test_an_answer_that_is_right_in_most_tasks_is_a_warning():
    assert frequent_line(answered(1.0, 0.0), 1.0).result is Result.OK
    line = frequent_line(answered(1.0, 1.0, 0.0, answer="A"), 1.0)
    assert line.result is Result.WARN
    assert "always 'A' earns the full reward in 2 of 3 tasks" in line.text


def test_a_question_that_is_its_own_answer_is_a_warning():
    """`number` takes the last number of a reply, also that of a repeated question."""
    assert repeated_line(answered(0.0, 0.0), 1.0).result is Result.OK
    line = repeated_line(answered(1.0, 0.0, answer="Which is smaller, 61 or 14?"), 1.0)
    assert line.result is Result.WARN and "in 1 of 2 tasks: train/0 with 'Which is" in line.text
    assert "env.adapter.pattern" in line.text
