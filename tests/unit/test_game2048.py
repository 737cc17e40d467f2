"""2048: its rules, game, limits and policies, without a server."""

import random

import pytest
from game2048 import policies, rules, tasks
from game2048.game import PLAYING, STOPPED, STUCK, Game

EMPTY = (0, 0, 0, 0)
FULL = ((2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 4, 2))


def start(seed: int = 0, **limits: int) -> Game:
    return Game(tasks.chance_of("train", None, seed), **limits)


@pytest.mark.parametrize(
    ("row", "slid", "points"),
    [
        (EMPTY, EMPTY, 0),
        ((0, 2, 0, 4), (2, 4, 0, 0), 0),
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),  # A merged tile does not merge again.
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((8, 0, 8, 16), (16, 16, 0, 0), 16),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_a_row_slides_the_same_way_in_every_direction(row, slid, points):
    board = (row, EMPTY, EMPTY, EMPTY)
    mirrored = tuple(line[::-1] for line in board)
    assert rules.move(board, "left") == ((slid, EMPTY, EMPTY, EMPTY), points)
    assert rules.move(mirrored, "right") == ((slid[::-1], EMPTY, EMPTY, EMPTY), points)
    upright = tuple(zip(*board, strict=True))
    assert rules.move(upright, "up")[0] == tuple(zip(slid, *[EMPTY] * 3, strict=True))
    assert rules.move(upright[::-1], "down")[0] == tuple(zip(slid, *[EMPTY] * 3, strict=True))[::-1]


def test_only_moves_that_move_something_are_legal():
    assert rules.legal_moves(FULL) == []
    assert rules.legal_moves(((2, 4, 0, 0), EMPTY, EMPTY, EMPTY)) == ["down", "right"]
    assert rules.legal_moves((EMPTY,) * 4) == []


def test_tiles_are_dealt_to_empty_cells_one_in_ten_a_four():
    rng = random.Random(0)
    board = ((0, *FULL[0][1:]), *FULL[1:3], (*FULL[3][:3], 0))
    dealt = [rules.deal_tile(board, rng) for _ in range(2000)]
    new = [max(after[0][0], after[3][3]) for after in dealt]
    assert all((after[0][0] == 0) != (after[3][3] == 0) for after in dealt)
    assert new.count(4) / 2000 == pytest.approx(rules.SHARE_OF_FOURS, abs=0.03)
    assert sum(after[0][0] > 0 for after in dealt) / 2000 == pytest.approx(0.5, abs=0.05)


def test_the_image_has_aligned_columns():
    board = ((2, 0, 0, 128), EMPTY, EMPTY, EMPTY)
    assert rules.draw(board).splitlines()[:2] == ["  2   .   . 128", "  .   .   .   ."]


def test_the_score_is_the_sum_of_the_points_and_tiles_only_double():
    game, rng, points = start(3), random.Random(0), 0
    while game.status == PLAYING:
        before = sum(map(sum, game.board))
        game.play(rng.choice(game.legal_moves))
        assert sum(map(sum, game.board)) - before in (2, 4)
        points += game.points
    assert (game.status, game.score) == (STUCK, points)
    assert game.play("up") == "The game is over. Reset to play again."
    assert (game.points, game.score) == (0, points)


@pytest.mark.parametrize("text", ["", "north", "up down", "é", "\0", "u" * 100_000])
def test_what_names_no_move_costs_a_turn_and_changes_nothing(text):
    game = start(max_moves=2)
    board = game.board
    assert "is no legal move: it cost a turn." in game.play(text)
    assert (game.board, game.turn, game.points) == (board, 1, 0)
    assert game.play(text).endswith("after 2 moves: 0 points.")
    assert game.status == STOPPED


def test_a_direction_in_which_nothing_moves_costs_a_turn_too():
    game = start()
    for _ in range(3):  # after a few moves, all tiles lie to the left
        game.board = tuple(rules.move(game.board, "left")[0])
    board = game.board
    assert "'left' is no legal move" in game.play(" LEFT ")
    assert (game.board, game.turn) == (board, 1)


def test_a_seed_fixes_the_game_and_seeds_vary():
    def final(seed):
        game, rng = start(seed, max_moves=30), random.Random(0)
        while game.status == PLAYING:
            game.play(rng.choice(game.legal_moves))
        return game.board

    assert [final(seed) for seed in range(20)] == [final(seed) for seed in range(20)]
    assert len({final(seed) for seed in range(20)}) == 20


def test_looking_ahead_survives_where_chance_gets_stuck():
    def score(policy, seed):
        game, rng = start(seed, max_moves=120), random.Random(seed)
        while game.status == PLAYING:
            seen = {"board": [list(row) for row in game.board], "legal_actions": game.legal_moves}
            game.play(policy([seen], rng))
        return game.score

    looked_ahead = sum(score(policies.expectimax, seed) for seed in range(4))
    assert looked_ahead > 1.2 * sum(score(policies.random_move, seed) for seed in range(4))
