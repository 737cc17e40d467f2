"""Tic-tac-toe: its rules, its players' rewards and its policies, without a server."""

import random

import pytest
from tic_tac_toe import policies, rules, tasks
from tic_tac_toe.game import DRAWN, MAX_RANDOM_MOVES, PLAYING, WON, Game


def played(moves: str) -> Game:
    game = Game(random.Random(0))
    for move in moves:
        game.play(move)
    return game


def play(**players) -> Game:
    """Play a game between two policies."""
    game, draw = Game(random.Random(0)), players.pop("draw")
    while game.status == PLAYING:
        seen = {"board": game.board, "turn": game.turn, "legal_actions": game.legal_moves}
        game.play(players[game.turn]([seen], draw))
    return game


@pytest.mark.parametrize(
    ("moves", "status", "rewards"),
    [
        ("", PLAYING, None),
        ("14", PLAYING, None),
        ("14253", WON, {"x": 1.0, "o": -1.0}),  # a row
        ("213457", WON, {"x": -1.0, "o": 1.0}),  # a column
        ("12539", WON, {"x": 1.0, "o": -1.0}),  # a diagonal
        ("123547698", DRAWN, {"x": 0.0, "o": 0.0}),
        ("11", WON, {"x": 1.0, "o": -1.0}),  # o has named a cell that is taken
        ("0", WON, {"x": -1.0, "o": 1.0}),
    ],
)
def test_a_game_ends_by_three_in_a_row_by_a_wrong_move_or_by_a_full_board(moves, status, rewards):
    game = played(moves)
    assert (game.status, game.rewards) == (status, rewards)


def test_a_game_that_is_over_does_not_change():
    game = played("14253")
    board = game.board
    assert "over" in game.play("9")
    assert game.board == board


def test_the_board_is_drawn_with_the_numbers_of_its_empty_cells():
    assert rules.draw(played("51").board) == "o 2 3\n4 x 6\n7 8 9"


def test_a_perfect_player_never_loses_and_two_of_them_draw():
    draw = random.Random(0)
    for _ in range(50):
        for player in "xo":
            scripts = dict.fromkeys("xo", policies.random_move) | {player: policies.perfect}
            assert play(**scripts, draw=draw).winner in ("", player)
        assert play(x=policies.perfect, o=policies.perfect, draw=draw).status == DRAWN


@pytest.mark.parametrize(
    ("board", "turn", "expected"),
    [
        ("xx.oo....", "x", {"3"}),
        ("xx.oo....", "o", {"6"}),  # its own win, though 3 would block
        ("xx..o....", "o", set("346789")),  # a threat is not answered
    ],
)
def test_a_player_that_takes_wins_sees_no_threats(board, turn, expected):
    seen = {"board": board, "turn": turn, "legal_actions": rules.legal_moves(board)}
    draw = random.Random(0)
    assert {policies.taking_wins([seen], draw) for _ in range(200)} == expected


def test_random_first_moves_end_no_game_and_are_those_of_the_index():
    boards = [
        Game(tasks.chance_of("train", index, None), MAX_RANDOM_MOVES).board for index in range(200)
    ]
    assert {9 - board.count(".") for board in boards} == set(range(MAX_RANDOM_MOVES + 1))
    assert boards[7] == Game(tasks.chance_of("train", 7, None), MAX_RANDOM_MOVES).board
    assert not any(rules.has_won(board, player) for board in boards for player in "xo")
