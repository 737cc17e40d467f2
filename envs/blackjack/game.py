"""One hand of OpenSpiel's blackjack: one deck, one player, hit or stand."""

import random
from typing import NamedTuple

import pyspiel

PLAYING, WON, DRAWN, LOST = "playing", "won", "drawn", "lost"
FORFEITED_REWARD = -1.0
_PLAYER = 0
_SOFT_ACE_BONUS = 10  # An ace counts 11 instead of 1 if the total stays within 21.


class Hand(NamedTuple):
    """Cards in the order dealt, with OpenSpiel's names: suit C D H S, then rank 2-9 T J Q K A."""

    cards: list[str]
    total: int
    is_soft: bool  # an ace of the hand counts 11


class Game:
    """The state of a hand, in progress or ended. The generator `chance` draws all cards."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._state = _GAME.new_initial_state()
        self._is_forfeited = False
        self.turn = 0
        self._deal()

    def play(self, text: str) -> str:
        """Take the action that the player wrote, and return the message to show.

        A text that names no action forfeits the hand. A hand that has ended does not change.
        """
        if self.status != PLAYING:
            return "The hand is over. Reset to play again."
        self.turn += 1
        wanted = text.strip().lower()
        known = {name: action for action, name in self._actions().items()}
        known |= {name[0]: action for name, action in known.items()}
        if wanted not in known:
            self._is_forfeited = True
            return f"{wanted[:20]!r} is no action: you forfeited the hand."
        self._state.apply_action(known[wanted])
        self._deal()
        return self._outcome()

    @property
    def status(self) -> str:
        """Return `playing`, `won`, `drawn` or `lost`."""
        if not (self._is_forfeited or self._state.is_terminal()):
            return PLAYING
        return DRAWN if self.reward == 0 else WON if self.reward > 0 else LOST

    @property
    def reward(self) -> float:
        """Return 1.0 if won, -1.0 if lost or forfeited, 0.0 if drawn or in progress."""
        return FORFEITED_REWARD if self._is_forfeited else self._state.returns()[_PLAYER]

    @property
    def player(self) -> Hand:
        """Return the player's hand."""
        return _hand(self._state, _PLAYER)

    @property
    def dealer(self) -> Hand:
        """Return the dealer's hand. Before the end, the player must see only one of its cards."""
        return _hand(self._state, self._state.dealer_id())

    @property
    def dealer_card(self) -> str:
        """Return the dealer's open card."""
        return _name(self._state, self._state.dealers_visible_card())

    @property
    def legal_actions(self) -> list[str]:
        """Return the names of the legal actions; none at the end."""
        return list(self._actions().values())

    def _actions(self) -> dict[int, str]:
        state = self._state
        return {
            action: state.action_to_string(_PLAYER, action).lower()
            for action in (state.legal_actions() if self.status == PLAYING else [])
        }

    def _deal(self) -> None:
        """Draw cards until it is the player's turn or the hand is over."""
        while self._state.is_chance_node():
            cards, weights = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._chance.choices(cards, weights)[0])

    def _outcome(self) -> str:
        if self.status == PLAYING:
            return ""
        totals = f"{self.player.total} against {self.dealer.total}"
        reason = "you went over 21" if self.player.total > 21 else totals
        return f"You {'drew' if self.status == DRAWN else self.status}: {reason}."


def _hand(state: pyspiel.State, player: int) -> Hand:
    cards = [_name(state, card) for card in state.cards(player)]
    total = state.get_best_player_total(player)
    is_soft = total - _SOFT_ACE_BONUS == sum(_low_value(card) for card in cards)
    return Hand(cards, total, is_soft)


def _low_value(card: str) -> int:
    """Return a card's value, with an ace as 1."""
    rank = card[1]
    return 1 if rank == "A" else 10 if rank in "TJQK" else int(rank)


def _name(state: pyspiel.State, card: int) -> str:
    return state.action_to_string(pyspiel.PlayerId.CHANCE, card)


_GAME = pyspiel.load_game("blackjack")
