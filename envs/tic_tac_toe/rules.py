"""The rules of tic-tac-toe as pure functions of boards.

A board is a text of nine cells, row by row: x, o, or "." for an empty one. x moves first. Cells
are numbered from 1 to 9.
"""

from functools import cache

PLAYERS = ("x", "o")
EMPTY = "." * 9
LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)


def legal_moves(board: str) -> list[str]:
    """Return the numbers of the empty cells."""
    return [str(number) for number, cell in enumerate(board, start=1) if cell == "."]


def put(board: str, move: str, player: str) -> str:
    """Return the board with the player's mark in the cell `move`."""
    place = int(move) - 1
    return board[:place] + player + board[place + 1 :]


def other(player: str) -> str:
    """Return the opponent of a player."""
    return "o" if player == "x" else "x"


def has_won(board: str, player: str) -> bool:
    """Return whether the player has three in a row."""
    return any(all(board[place] == player for place in line) for line in LINES)


@cache
def value(board: str, player: str) -> int:
    """Return what `player`, who is to move, can reach against a perfect opponent: 1 is a win."""
    if has_won(board, other(player)):
        return -1
    return max(
        (-value(put(board, move, player), other(player)) for move in legal_moves(board)), default=0
    )


def best_moves(board: str, player: str) -> list[str]:
    """Return the moves of a perfect player."""
    moves = legal_moves(board)
    values = [-value(put(board, move, player), other(player)) for move in moves]
    return [move for move, each in zip(moves, values, strict=True) if each == max(values)]


def draw(board: str) -> str:
    """Return the board as three lines of text, with the numbers of the empty cells."""
    cells = [str(number) if cell == "." else cell for number, cell in enumerate(board, start=1)]
    return "\n".join(" ".join(cells[start : start + 3]) for start in (0, 3, 6))
