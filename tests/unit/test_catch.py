"""Catch's rules, tasks and policies, without a server."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspiel")
from catch import policies, rewards, tasks
from catch.game import CAUGHT, MISSED, PLAYING, Game


def start(seed: int = 0, **size: int) -> Game:
    return Game(tasks.chance_of("train", None, seed), **size)


def observation_of(game: Game) -> dict[str, object]:
    return {
        "ball_column": game.ball.column,
        "paddle_column": game.paddle.column,
        "legal_actions": game.legal_actions,
    }


def play_with(policy, game: Game, rng: random.Random) -> Game:
    while game.status == PLAYING:
        game.play(policy([observation_of(game)], rng))
    return game


def test_the_ball_falls_a_row_with_every_move():
    game = start()
    column = game.ball.column
    for row in range(1, 10):
        game.play("stay")
        assert game.ball == (row, column)
        assert game.turn == row
    assert game.status != PLAYING and game.legal_actions == []


def test_moves_and_their_first_letters_move_the_paddle_up_to_the_wall():
    game = start()
    columns = []
    for text in ["left", " L\n", "l", "right", "R", "stay", "s"]:
        assert game.play(text) == ""
        columns.append(game.paddle.column)
    assert columns == [1, 0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("text", ["", "up", "left right", "lefty", "é", "\0", "x" * 100_000])
def test_what_names_no_move_counts_as_stay_and_is_answered(text):
    game = start()
    assert game.play(text).endswith("is no action: the paddle stayed.")
    assert (game.ball.row, game.paddle.column, game.turn) == (1, 2, 1)


@pytest.mark.parametrize("size", [{}, {"rows": 6, "columns": 10}, {"rows": 20, "columns": 3}])
def test_the_perfect_player_catches_every_ball(size):
    rng = random.Random(0)
    for seed in range(20):
        game = play_with(policies.perfect, start(seed, **size), rng)
        assert (game.status, game.reward) == (CAUGHT, 1.0)
        assert game.ball == game.paddle


def test_the_random_player_mostly_misses():
    rng = random.Random(0)
    games = [play_with(policies.random_move, start(seed), rng) for seed in range(300)]
    assert {game.reward for game in games if game.status == MISSED} == {-1.0}
    assert sum(game.status == CAUGHT for game in games) / 300 == pytest.approx(0.2, abs=0.06)


def test_closer_pays_each_move_towards_the_ball():
    game = next(game for game in map(start, range(100)) if game.ball.column == 0)
    first, turns = observation_of(game), []
    for text in ("left", "right", None, "stay", "left", "left", "left"):
        if text is not None:
            game.play(text)
        turns.append(SimpleNamespace(observation={} if text is None else observation_of(game)))
    episode = SimpleNamespace(first_observation=first, turns=turns)
    assert rewards.closer(episode) == [1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_game_that_has_ended_stays_as_it_is():
    game = play_with(policies.perfect, start(), random.Random(0))
    assert game.play("left") == "The game is over. Reset to play again."
    assert (game.status, game.turn) == (CAUGHT, 9)


def test_tasks_are_fixed_and_no_two_splits_share_a_seed():
    def draws(split, index, seed=None):
        return tasks.chance_of(split, index, seed).getrandbits(64)

    drawn = {draws(split, index) for split in tasks.NUM_TASKS for index in range(200)}
    drawn |= {draws(split, None, seed) for split in tasks.NUM_TASKS for seed in range(200)}
    assert len(drawn) == 800
    assert draws("eval", 7) == draws("eval", 7, seed=1)
    assert draws("train", None) != draws("train", None)
    columns = [Game(tasks.chance_of("train", index, None)).ball.column for index in range(300)]
    assert set(columns) == {0, 1, 2, 3, 4}
