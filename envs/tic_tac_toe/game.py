"""One game of tic-tac-toe: its board, whose turn it is, and its end."""

import random

from .rules import EMPTY, PLAYERS, has_won, legal_moves, other, put

PLAYING, WON, DRAWN = "playing", "won", "drawn"
MAX_RANDOM_MOVES = 7


class Game:
    """The state of a game. `winner` is empty until somebody has won."""

    def __init__(self, chance: random.Random, random_moves: int = 0) -> None:
        """random_moves: the most moves that chance draws first, none of which wins."""
        self.board = EMPTY
        self.turn = PLAYERS[0]
        self.winner = ""
        for _ in range(chance.randint(0, random_moves)):
            boards = [put(self.board, move, self.turn) for move in self.legal_moves]
            if not (quiet := [board for board in boards if not has_won(board, self.turn)]):
                break
            self.board, self.turn = chance.choice(quiet), other(self.turn)

    def play(self, text: str) -> str:
        """Make the move of the player whose turn it is, and return the message to show.

        A text that names no empty cell loses the game. A game that has ended does not change.
        """
        if self.status != PLAYING:
            return "The game is over. Reset to play again."
        move = text.strip()
        if move not in self.legal_moves:
            self.winner = other(self.turn)
            return f"{move[:20]!r} is no empty cell: {self.winner} wins."
        self.board = put(self.board, move, self.turn)
        if has_won(self.board, self.turn):
            self.winner = self.turn
            return f"Three in a row: {self.winner} wins."
        self.turn = other(self.turn)
        return "A draw." if self.status == DRAWN else ""

    @property
    def status(self) -> str:
        """Return `playing`, `won` or `drawn`."""
        if self.winner:
            return WON
        return PLAYING if self.legal_moves else DRAWN

    @property
    def legal_moves(self) -> list[str]:
        """Return the numbers of the empty cells."""
        return legal_moves(self.board)

    @property
    def rewards(self) -> dict[str, float] | None:
        """Return what the game has earned each player: 1, 0 or -1. None while it is played."""
        if self.status == PLAYING:
            return None
        earned = {self.winner: 1.0, other(self.winner): -1.0} if self.winner else {}
        return {player: earned.get(player, 0.0) for player in PLAYERS}
