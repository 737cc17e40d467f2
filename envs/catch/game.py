"""One game of OpenSpiel's catch: the ball falls a row with every move of the paddle."""

import random
from functools import lru_cache
from typing import NamedTuple

import pyspiel

DEFAULT_ROWS, DEFAULT_COLUMNS = 10, 5  # OpenSpiel's own
# Within these sizes the paddle can reach every ball from the middle.
ROWS, COLUMNS = (6, 20), (3, 10)

BALL, PADDLE = "o", "x"
PLAYING, CAUGHT, MISSED = "playing", "caught", "missed"
MESSAGES = {PLAYING: "", CAUGHT: "You caught the ball.", MISSED: "You missed the ball."}
STAY = 1


class Place(NamedTuple):
    """A cell of the grid; rows are counted from the top, both from 0."""

    row: int
    column: int


class Game:
    """The state of a game. The generator `chance` draws the column that the ball falls in."""

    def __init__(
        self, chance: random.Random, rows: int = DEFAULT_ROWS, columns: int = DEFAULT_COLUMNS
    ) -> None:
        self._state = _load(rows, columns).new_initial_state()
        outcomes, weights = zip(*self._state.chance_outcomes(), strict=True)
        self._state.apply_action(chance.choices(outcomes, weights)[0])
        self.num_moves = rows - 1
        self.turn = 0
        self._read_grid()

    def play(self, text: str) -> str:
        """Make the move that the player wrote, and return the message to show.

        A text that names no action counts as `stay`. A game that has ended does not change.
        """
        if self._state.is_terminal():
            return "The game is over. Reset to play again."
        wanted = text.strip().lower()
        known = {name: action for action, name in self._actions().items()}
        known |= {name[0]: action for name, action in known.items()}
        self._state.apply_action(known.get(wanted, STAY))
        self.turn += 1
        self._read_grid()
        complaint = "" if wanted in known else f"{wanted[:20]!r} is no action: the paddle stayed. "
        return (complaint + MESSAGES[self.status]).strip()

    @property
    def status(self) -> str:
        """Return `playing`, `caught` or `missed`."""
        if not self._state.is_terminal():
            return PLAYING
        return CAUGHT if self.reward > 0 else MISSED

    @property
    def reward(self) -> float:
        """Return the last move's reward: 1.0 for a caught ball, -1.0 for a missed one, else 0.0."""
        return self._state.rewards()[0]

    @property
    def legal_actions(self) -> list[str]:
        """Return the names of the legal moves; none at the end."""
        return list(self._actions().values())

    def _actions(self) -> dict[int, str]:
        state = self._state
        return {
            action: state.action_to_string(0, action).lower()
            for action in ([] if state.is_terminal() else state.legal_actions())
        }

    def _read_grid(self) -> None:
        """Read the positions of ball and paddle from OpenSpiel's text drawing.

        A drawing of a caught ball shows only the ball, because it covers the paddle.
        """
        self.grid = str(self._state).strip()
        places = {
            sign: Place(row, line.index(sign))
            for row, line in enumerate(self.grid.split())
            for sign in (BALL, PADDLE)
            if sign in line
        }
        self.ball = places.get(BALL) or places[PADDLE]
        self.paddle = places.get(PADDLE) or places[BALL]


@lru_cache(maxsize=64)
def _load(rows: int, columns: int) -> pyspiel.Game:
    return pyspiel.load_game("catch", {"rows": rows, "columns": columns})
