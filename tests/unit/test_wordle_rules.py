"""Wordle's rules, lists, game, policies and reward terms, without a server."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from wordle import policies, rewards, rules, words
from wordle.game import LOST, PLAYING, WON, Game

DATA = Path(words.__file__).parent / "data"
SCOWL = Path("/usr/share/dict/scowl")


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("about", "about", "ggggg"),
        ("crane", "sloth", "....."),
        ("raise", "arise", "yyggg"),
        ("speed", "abide", "..y.y"),  # One e in the answer: only the first e is coloured.
        ("speed", "erase", "y.yy."),
        ("speed", "steal", "g.g.."),
        ("allee", "apple", "gy..g"),  # The green e is served before the e to its left.
        ("geese", "these", "..ggg"),
        ("llama", "label", "gyy.."),
        ("eerie", "there", "y.y.g"),
        ("mamma", "maxim", "ggy.."),
        ("sassy", "essay", "yyg.g"),
    ],
)
def test_score_of_repeated_letters(guess, answer, marks):
    assert rules.score(guess, answer) == marks


def test_score_agrees_with_a_count_of_letters():
    """A letter's coloured copies are as many as both words share, and greens are equal
    positions."""
    rng = random.Random(0)
    for _ in range(2000):
        guess, answer = ("".join(rng.choices("abc", k=5)) for _ in range(2))
        marks = rules.score(guess, answer)
        assert [mark == "g" for mark in marks] == [
            g == a for g, a in zip(guess, answer, strict=True)
        ]
        for letter in "abc":
            coloured = sum(
                g == letter and mark != "." for g, mark in zip(guess, marks, strict=True)
            )
            assert coloured == min(guess.count(letter), answer.count(letter))


def board_of(answer: str, *guesses: str) -> list[dict[str, str]]:
    return [{"guess": guess, "marks": rules.score(guess, answer)} for guess in guesses]


@pytest.mark.parametrize(
    ("answer", "guesses", "pattern", "present", "absent"),
    [
        ("trend", [], "_____", "", ""),
        ("trend", ["crane", "drone"], "_r_n_", "de", "aco"),
        ("erase", ["speed"], "_____", "ees", "dp"),  # Two e's are known, none is placed.
        ("abide", ["speed"], "_____", "de", "ps"),  # The second e is grey, yet not absent.
        ("these", ["eerie", "geese"], "__ese", "", "gir"),  # Yellow first, placed later.
        ("apple", ["allee"], "a___e", "l", ""),
    ],
)
def test_summaries_are_functions_of_the_board(answer, guesses, pattern, present, absent):
    board = board_of(answer, *guesses)
    assert rules.pattern(board) == pattern
    assert rules.present(board) == present
    assert rules.absent(board) == absent


def test_consistent_keeps_the_answer_and_drops_what_was_guessed():
    board = board_of("trend", "crane", "drone")
    assert rules.consistent("trend", board)
    assert not rules.consistent("drone", board)
    assert not rules.consistent("brunt", board)
    assert rules.consistent("brunt", [])


@pytest.mark.parametrize("name", words.LISTS)
def test_splits_are_disjoint_and_complete(name):
    train, held_out = words.answers("train", name), words.answers("eval", name)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == list(words.load(name))
    assert len(held_out) == round(0.2 * len(words.load(name)))
    assert words.num_tasks("eval", name) == len(held_out)


def test_the_order_of_tasks_never_changes():
    joined = " ".join(words.answers("train") + words.answers("eval"))
    assert hashlib.sha256(joined.encode()).hexdigest()[:16] == "9a3a8194ca4e6e57"


@pytest.mark.parametrize("name", words.LISTS)
def test_lists_have_their_digest_and_only_plain_words(name):
    sums = (DATA / "SHA256SUMS").read_text().splitlines()
    digests = dict(reversed(line.split()) for line in sums)
    assert hashlib.sha256((DATA / f"{name}.txt").read_bytes()).hexdigest() == digests[f"{name}.txt"]
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words.load(name))
    assert not set(words.load(name)) & set((DATA / "excluded.txt").read_text().split())


@pytest.mark.skipif(not SCOWL.exists(), reason="needs Debian's package scowl")
def test_lists_are_what_their_script_makes(tmp_path):
    script = [sys.executable, str(DATA / "make_lists.py"), str(SCOWL), str(tmp_path)]
    subprocess.run(script, check=True, timeout=240)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (DATA / made.name).read_bytes()


def test_a_seed_fixes_the_answer_and_different_seeds_vary():
    def draw(seed):
        return words.choose_answer("train", "common250", None, seed)

    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed) for seed in range(50)}) > 30
    assert words.choose_answer("eval", "common250", 7, 1) == words.answers("eval")[7]


def test_invalid_guesses_cost_a_turn_and_stay_off_the_board():
    game = Game(answer="about", words="common250")
    for guess in ["", "cat", "zzzzz", "ab-ut", "ébène", "about above"]:
        assert game.status == PLAYING
        assert game.play(guess).startswith("Invalid guess")
        assert game.marks == ""
    assert (game.status, game.turn, game.board) == (LOST, 6, [])


def test_a_game_is_won_and_then_stays_as_it_is():
    game = Game(answer="about", words="common250")
    assert game.play("  ABOUT\n") == "You won on turn 1."
    assert (game.status, game.marks) == (WON, "ggggg")
    game.play("adopt")
    assert (game.status, game.turn, len(game.board)) == (WON, 1, 1)


def play_with(policy, answer: str, name: str, rng: random.Random) -> Game:
    game = Game(answer=answer, words=name)
    observations = []
    while game.status == PLAYING:
        observations.append({"words": name, "board": list(game.board)})
        game.play(policy(observations, rng))
    return game


def test_policies_win_as_often_as_they_should():
    rng = random.Random(0)
    answers = words.load("common250")
    won = {
        policy: sum(play_with(policy, a, "common250", rng).status == WON for a in answers)
        for policy in (policies.consistent, policies.random_word)
    }
    assert won[policies.consistent] > 0.9 * len(answers)
    assert won[policies.random_word] < 0.1 * len(answers)


def test_the_consistent_policy_reaches_every_candidate_and_no_other():
    rng = random.Random(0)
    board = board_of("about", "grand")
    candidates = {word for word in words.load("common250") if rules.consistent(word, board)}
    observations = [{"words": "common250", "board": board}]
    drawn = {policies.consistent(observations, rng) for _ in range(100 * len(candidates))}
    assert drawn == candidates
    impossible = [{"guess": "about", "marks": "ggggg"}, {"guess": "about", "marks": "....."}]
    with pytest.raises(ValueError, match="common250"):
        policies.consistent([{"words": "common250", "board": impossible}], rng)


def episode_of(answer: str, *guesses: str | None) -> SimpleNamespace:
    """Return an episode as the trainer has it; None stands for a reply that was not sent."""
    game = Game(answer=answer, words="common250")
    turns = []
    for guess in guesses:
        observation = {}
        if guess is not None:
            game.play(guess)
            observation = {"guess": game.guess, "marks": game.marks, "board": list(game.board)}
        turns.append(SimpleNamespace(observation=observation))
    return SimpleNamespace(first_observation={"board": []}, turns=turns)


def test_consistent_guess_pays_only_for_words_that_could_be_the_answer():
    episode = episode_of("about", "adopt", None, "adopt", "zzzzz", "grant", "about")
    assert rewards.consistent_guess(episode) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_consistent_guess_pays_nothing_after_the_end():
    assert rewards.consistent_guess(episode_of("about", "about", "about")) == [1.0, 0.0]


def test_without_holdout_both_splits_ask_for_every_word():
    every = sorted(words.load("common250"))
    assert sorted(words.answers("train", "common250", holdout=False)) == every
    assert sorted(words.answers("eval", "common250", holdout=False)) == every
