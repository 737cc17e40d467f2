"""Blackjack's rules, tasks and policies, without a server."""

import random
from dataclasses import asdict, dataclass

import pytest

pytest.importorskip("pyspiel")
from blackjack import policies, tasks
from blackjack.game import DRAWN, LOST, PLAYING, WON, Game


class Deck:
    """Deals named cards instead of random ones."""

    def __init__(self, *cards: str) -> None:
        self._cards = iter(cards)

    def choices(self, cards, weights):
        suits, ranks = "CDHS", "A23456789TJQK"
        suit, rank = next(self._cards)
        card = suits.index(suit) * len(ranks) + ranks.index(rank)
        assert card in cards and len(set(weights)) == 1
        return [card]


@dataclass
class Seen:
    total: int
    soft: bool
    dealer_card: str
    legal_actions: tuple[str, ...] = ("hit", "stand")


def play_with(policy, seed: int, rng: random.Random) -> Game:
    game = Game(tasks.chance_of("train", None, seed))
    while game.status == PLAYING:
        seen = Seen(game.player.total, game.player.is_soft, game.dealer_card)
        game.play(policy([asdict(seen)], rng))
    return game


@pytest.mark.parametrize(
    ("cards", "actions", "status", "reward", "message"),
    [
        (["CK", "H9", "D7", "HT"], "s", WON, 1.0, "You won: 19 against 17."),
        (["CK", "H9", "D9", "HT"], "s", DRAWN, 0.0, "You drew: 19 against 19."),
        (["CK", "H8", "D9", "HT"], "s", LOST, -1.0, "You lost: 18 against 19."),
        (["CK", "H8", "D9", "HT", "S4"], "h", LOST, -1.0, "You lost: you went over 21."),
        (["CK", "H2", "D6", "HT", "S9", "SK"], "hs", WON, 1.0, "You won: 21 against 26."),
        # the dealer stands on soft 17
        (["CK", "H9", "DA", "H6"], "s", WON, 1.0, "You won: 19 against 17."),
        (["CA", "HK", "D6", "HT", "S5"], "s", DRAWN, 0.0, "You drew: 21 against 21."),
    ],
)
def test_hands_end_as_they_should(cards, actions, status, reward, message):
    game = Game(Deck(*cards))
    for action in actions:
        assert (game.status, game.reward) == (PLAYING, 0.0)
        said = game.play(action)
    assert (game.status, game.reward, said) == (status, reward, message)
    assert game.legal_actions == []
    assert game.play("hit") == "The hand is over. Reset to play again."
    assert (game.status, game.reward, game.turn) == (status, reward, len(actions))


@pytest.mark.parametrize(
    ("cards", "total", "is_soft"),
    [
        (["CA", "H6"], 17, True),
        (["CA", "H6", "DT"], 17, False),
        (["CA", "HA"], 12, True),
        (["CA", "HK"], 21, True),
        (["C9", "HJ"], 19, False),
    ],
)
def test_a_hand_is_soft_while_an_ace_counts_eleven(cards, total, is_soft):
    game = Game(Deck(*cards[:2], "D2", "H2", *cards[2:]))
    for _ in cards[2:]:
        game.play("hit")
    assert game.player == (cards, total, is_soft)
    assert game.dealer_card == "H2"
    assert game.legal_actions == ["hit", "stand"]


@pytest.mark.parametrize("text", ["", "double", "hit me", "é", "\0", "h" * 100_000])
def test_what_names_no_action_forfeits_the_hand(text):
    game = Game(Deck("CK", "H9", "D7", "HT"))
    assert game.play(text).endswith("is no action: you forfeited the hand.")
    assert (game.status, game.reward, game.legal_actions) == (LOST, -1.0, [])


def test_a_seed_fixes_all_cards_and_seeds_vary():
    def final(seed):
        game = play_with(policies.basic_strategy, seed, random.Random(0))
        return (*game.player.cards, *game.dealer.cards)

    assert [final(seed) for seed in range(30)] == [final(seed) for seed in range(30)]
    assert len({final(seed) for seed in range(30)}) == 30


@pytest.mark.parametrize(
    ("total", "soft", "dealer_card", "action"),
    [
        (11, False, "D6", "hit"),
        (12, False, "D3", "hit"),
        (12, False, "D4", "stand"),
        (13, False, "D2", "stand"),
        (16, False, "D7", "hit"),
        (16, False, "DA", "hit"),
        (17, False, "DT", "stand"),
        (17, True, "D6", "hit"),
        (18, True, "D8", "stand"),
        (18, True, "D9", "hit"),
        (19, True, "DA", "stand"),
    ],
)
def test_the_table_of_basic_strategy(total, soft, dealer_card, action):
    seen = asdict(Seen(total, soft, dealer_card))
    assert policies.basic_strategy([seen], random.Random(0)) == action


def test_basic_strategy_loses_less_than_chance():
    rng = random.Random(0)

    def mean(policy):
        return sum(play_with(policy, seed, rng).reward for seed in range(1000)) / 1000

    assert mean(policies.basic_strategy) > -0.15
    assert mean(policies.random_action) < -0.25
