"""Play 2048 by rules of one's own, and let the server train the model that plays.

Start the server first: `openenv-pipe serve --train conf=client`, with the environment variable
OPENENV_PIPE_TOKEN as here, or with the token that it prints. Several of these may play at once.
"""

import random
import sys

from openenv_pipe.client import Client, Rollout, TrainingEndedError

SIZE, MAX_MOVES = 4, 12
MOVES = {"l": 0, "u": 1, "r": 2, "d": 3}  # quarter turns that make the move one to the left
Board = list[list[int]]


def turned(board: Board, times: int) -> Board:
    """Return the board after quarter turns against the clock."""
    for _ in range(times % 4):
        board = [list(row) for row in zip(*board, strict=True)][::-1]
    return board


def pushed(row: list[int]) -> tuple[list[int], int]:
    """Push a row to the left; return it, and the points of its merges."""
    tiles, merged, points = [tile for tile in row if tile], [], 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        merged.append(tile)
    return merged + [0] * (SIZE - len(merged)), points


def moved(board: Board, move: str) -> tuple[Board, int]:
    """Return the board after a move, and the points that it gives."""
    rows = [pushed(row) for row in turned(board, MOVES[move])]
    return turned([row for row, _ in rows], -MOVES[move]), sum(points for _, points in rows)


def deal(board: Board, rng: random.Random) -> None:
    """Put a new tile on an empty cell."""
    row, column = rng.choice([(y, x) for y in range(SIZE) for x in range(SIZE) if not board[y][x]])
    board[row][column] = 2


def play(rollout: Rollout, rng: random.Random) -> None:
    """Play one game; the reward is its points, and a little for each move that is one."""
    board, score, num_moves = [[0] * SIZE for _ in range(SIZE)], 0, 0
    deal(board, rng)
    for _ in range(MAX_MOVES):
        deal(board, rng)
        shown = "/".join("".join(f"{tile or '.'}" for tile in row) for row in board)
        reply = rollout.chat([{"role": "user", "content": shown}])["content"]
        move = next((letter for letter in reply if letter in MOVES), None)
        after, points = moved(board, move) if move else (board, 0)
        if after == board:  # no move, or one that moves nothing
            break
        board, score, num_moves = after, score + points, num_moves + 1
    rollout.finish(score / 100 + num_moves / MAX_MOVES, {"score": score, "moves": num_moves})


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    num_played = 0
    with Client(url) as client:
        try:
            while True:
                with client.rollout() as rollout:  # Its seed is the same for its whole group.
                    seed = rollout.task["observation"]["seed"]
                    play(rollout, random.Random(seed))
                num_played += 1
        except TrainingEndedError:
            print(f"played {num_played} games")


if __name__ == "__main__":
    main()
