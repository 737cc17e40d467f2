"""The rules of 2048 as pure functions of boards.

A board has four rows of four tiles, from top to bottom and left to right; 0 is an empty cell.
"""

import random
from functools import lru_cache

SIZE = 4
DIRECTIONS = ("up", "down", "left", "right")
SHARE_OF_FOURS = 0.1

Row = tuple[int, ...]
Board = tuple[Row, ...]
Cell = tuple[int, int]  # row and column


def first_board(rng: random.Random) -> Board:
    """Return an empty board with two new tiles."""
    return deal_tile(deal_tile(((0,) * SIZE,) * SIZE, rng), rng)


def deal_tile(board: Board, rng: random.Random) -> Board:
    """Return the board with a new 2 (one time in ten a 4) in a random empty cell."""
    tile = 4 if rng.random() < SHARE_OF_FOURS else 2
    return put(board, rng.choice(empty_cells(board)), tile)


def put(board: Board, cell: Cell, tile: int) -> Board:
    """Return the board with `tile` in one cell."""
    y, x = cell
    row = (*board[y][:x], tile, *board[y][x + 1 :])
    return (*board[:y], row, *board[y + 1 :])


def empty_cells(board: Board) -> list[Cell]:
    """Return the cells without a tile, starting at the upper left."""
    return [(y, x) for y, row in enumerate(board) for x, tile in enumerate(row) if not tile]


def move(board: Board, direction: str) -> tuple[Board, int]:
    """Slide all tiles. Return the board, without a new tile, and the sum of the merged tiles.

    Equal neighbours merge, starting at the side that they slide to; a merged tile does not merge
    again. If the returned board is unchanged, the move is not legal.
    """
    is_vertical = direction in ("up", "down")
    order = -1 if direction in ("down", "right") else 1
    lines = _transposed(board) if is_vertical else board
    slid = [_slide(line[::order]) for line in lines]
    lines = tuple(line[::order] for line, _ in slid)
    return _transposed(lines) if is_vertical else lines, sum(points for _, points in slid)


def legal_moves(board: Board) -> list[str]:
    """Return the directions in which at least one tile moves; none when the game is over."""
    return [direction for direction in DIRECTIONS if move(board, direction)[0] != board]


def draw(board: Board) -> str:
    """Return the board as text: columns aligned to the right, '.' for an empty cell."""
    width = len(str(max(map(max, board))))
    return "\n".join(" ".join(str(tile or ".").rjust(width) for tile in row) for row in board)


@lru_cache(maxsize=65_536)
def _slide(row: Row) -> tuple[Row, int]:
    """Return the row slid to the left, and the sum of its merged tiles."""
    tiles = [tile for tile in row if tile]
    slid: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        slid.append(tile)
    return (*slid, *(0,) * (len(row) - len(slid))), points


def _transposed(board: Board) -> Board:
    return tuple(zip(*board, strict=True))
