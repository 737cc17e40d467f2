"""What the environments that ship have in common, without their servers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from catch import tasks as catch_tasks
from coding import problems
from echo import rules
from email_search import tasks as email_tasks
from wordle import words

ENVS = Path(__file__).parents[2] / "envs"
SHARED = [{"split": "test"}, {"split": ["train"]}, {"index": True}, {"seed": "seven"}]
OWN = {  # of the function that chooses a task
    catch_tasks.chance_of: [{"index": 10_000}],
    email_tasks.choose_task: [{"index": 960}, {"index": -1}],
    problems.choose_problem: [{"index": -1}],
    words.choose_answer: [
        *({"words": "common"}, {"words": ["common250"]}),
        *({"index": 200}, {"index": -1}, {"index": "3"}),
    ],
    rules.choose_letters: [{"index": 400}, {"index": -1}],
}


@pytest.mark.parametrize("choose", OWN)
def test_tasks_that_do_not_exist_are_named(choose):
    task = {"split": "train", "index": None, "seed": None}
    if choose is words.choose_answer:
        task["words"] = "common250"
    for wrong in [*SHARED, *OWN[choose]]:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=name) as caught:
            choose(**(task | wrong))
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "modules",
    [
        *("blackjack.policies", "catch.policies", "game2048.policies", "reasoning.policies"),
        *("tic_tac_toe.policies", "coding.policies, coding.episode"),
        *("email_search.policies, email_search.episode", "wordle.policies, wordle.rewards"),
    ],
)
def test_what_the_trainer_imports_loads_neither_openenv_nor_the_games(modules):
    heavy = "{'openenv', 'fastmcp', 'pyspiel', 'reasoning_gym'}"
    code = f"import sys, {modules}; assert not {heavy} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ENVS)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=240)
