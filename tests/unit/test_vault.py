"""The game of `examples/vault`, without its server."""

import random
from pathlib import Path

import pytest

ENVS = Path(__file__).parents[2] / "examples/vault/envs"


@pytest.fixture
def game(monkeypatch):
    monkeypatch.syspath_prepend(str(ENVS))
    from vault import game

    return game


def test_no_clue_of_an_evaluation_occurs_in_training(game):
    clues = {
        split: {game.Game(split, index, None).activity for index in range(num_tasks)}
        for split, num_tasks in game.NUM_TASKS.items()
    }
    assert {split: len(found) for split, found in clues.items()} == {"train": 18, "eval": 24}
    assert not clues["train"] & clues["eval"]


@pytest.mark.parametrize("index", range(20))
def test_the_room_of_the_clue_has_the_code_and_only_the_code_opens(game, index):
    played = game.Game("train", index, None)
    [room] = [room for room, found in game.ACTIVITIES.items() if played.activity in found]
    [elsewhere, *_] = [each for each in game.ACTIVITIES if each != room]
    assert played.look(elsewhere) == "Nothing here."
    code = int(played.look(room).removeprefix("A note: ").removesuffix("."))
    assert not played.is_over
    assert played.unlock(code) == "The vault is open."
    assert played.is_open


@pytest.mark.parametrize("calls", [("look", "look", "unlock"), ("unlock", "unlock", "unlock")])
def test_after_three_calls_a_game_is_over(game, calls):
    played = game.Game("train", 0, None)
    for name in calls:
        played.unlock(0) if name == "unlock" else played.look("")
    assert played.is_over
    assert not played.is_open
    with pytest.raises(game.OutOfTurnError):
        played.unlock(0)


@pytest.mark.parametrize(
    ("split", "index", "seed"),
    [
        *(("train", 1000, None), ("train", -1, None), ("eval", 200, None), ("test", 0, None)),
        *(("train", True, None), ("train", "3", None), (["train"], 0, None)),
        ("train", None, 1.5),
    ],
)
def test_tasks_that_do_not_exist_are_rejected(game, split, index, seed):
    with pytest.raises(ValueError, match="must be"):
        game.Game(split, index, seed)


def test_a_seed_chooses_among_all_tasks(game):
    played = {game.Game("train", None, seed)._code for seed in range(200)}
    assert len(played) > 100
    assert game.Game("train", None, 7)._code == game.Game("train", None, 7)._code


def test_the_scripted_policies_write_calls_and_use_the_code_once_they_have_it(game):
    from vault import policies

    first = {"activity": "frying eggs"}
    failed = {"result": None}
    found = {"result": {"data": "A note: 417."}}
    assert '"room": "kitchen"' in policies.expert([first], random.Random(0))
    assert '"name": "look"' in policies.searching([first], random.Random(0))
    for policy in (policies.expert, policies.searching):
        assert '{"name": "unlock", "arguments": {"code": 417}}' in policy(
            [first, failed, found], random.Random(0)
        )
