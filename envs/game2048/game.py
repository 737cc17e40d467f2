"""One game of 2048: its board, its score and its end."""

import random

from .rules import DIRECTIONS, deal_tile, draw, first_board, legal_moves, move

PLAYING, STUCK, STOPPED = "playing", "stuck", "stopped"
DEFAULT_MAX_MOVES = 2000
MAX_MOVES = (1, 100_000)
_BY_NAME = {name: direction for direction in DIRECTIONS for name in (direction, direction[0])}


class Game:
    """The state of a game. The generator `chance` draws all new tiles.

    `points` is the sum of the tiles that the last move merged, `score` the sum of all points.
    """

    def __init__(self, chance: random.Random, max_moves: int = DEFAULT_MAX_MOVES) -> None:
        self._chance = chance
        self.board = first_board(chance)
        self.max_moves = max_moves
        self.turn = 0
        self.points = 0
        self.score = 0

    def play(self, text: str) -> str:
        """Make the move that the player wrote, and return the message to show.

        A text that names no legal move leaves the board unchanged and counts as one of `max_moves`.
        A game that has ended does not change.
        """
        self.points = 0
        if self.status != PLAYING:
            return "The game is over. Reset to play again."
        self.turn += 1
        wanted = text.strip().lower()
        direction = _BY_NAME.get(wanted)
        if direction not in self.legal_moves:
            return f"{wanted[:20]!r} is no legal move: it cost a turn. {self._outcome()}".strip()
        board, self.points = move(self.board, direction)
        self.board = deal_tile(board, self._chance)
        self.score += self.points
        return self._outcome()

    @property
    def status(self) -> str:
        """Return `playing`, `stuck` without a legal move, or `stopped` after `max_moves`."""
        if not self.legal_moves:
            return STUCK
        return STOPPED if self.turn == self.max_moves else PLAYING

    @property
    def legal_moves(self) -> list[str]:
        """Return the directions in which at least one tile moves."""
        return legal_moves(self.board)

    @property
    def grid(self) -> str:
        """Return the board as text."""
        return draw(self.board)

    def _outcome(self) -> str:
        if self.status == PLAYING:
            return ""
        reason = "no move is left" if self.status == STUCK else f"after {self.max_moves} moves"
        return f"The game is over, {reason}: {self.score} points."
