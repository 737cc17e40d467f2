"""How the environment `questions` scores answers, without a server."""

import pytest
import yaml
from questions import scoring

from openenv_pipe.system.patterns import LimitedPattern
from openenv_pipe.system.resources import shipped_dir

pytestmark = pytest.mark.slow


def make(how, folder="", limit_s=60.0):
    return scoring.make_score(how, folder=str(folder), limit_s=limit_s)


@pytest.mark.parametrize(
    ("how", "row", "right", "wrong"),
    [
        ("exact", {"answer": "New  York"}, ["New York", " New York\n"], ["new york", "York", ""]),
        ("exact", {"answer": 7}, ["7"], ["7.0"]),
        ("exact", {"answer": True}, ["true"], ["True", "1"]),
        ("number", {"answer": 12}, ["12", "so: 12.0", "= 12", "7+5=12"], ["-12", "12, no, 13", ""]),
        ("number", {"answer": "#### 1,234"}, ["$1,234.00", "1234"], ["1.234", "234"]),
        ("number", {"answer": "6 * 7 = \\boxed{42}%"}, ["42", "42 %"], ["0.42"]),
        ("number", {"answer": -0.5}, ["-1/2", "−.5", "is -$0.5", "–0.5"], ["1/2", "0.5", "10-0.5"]),
        ("number", {"answer": 1000}, ["1e3", "1E+3"], ["1e9999999", "9" * 5000, "1e3e3", "1/0"]),
        ("choice", {"answer": "B"}, ["B", "b", "(b)", "The answer is B."], ["A", "", "I think A"]),
        (
            "choice",
            {"answer": "Paris", "choices": ["Rome", "Paris"]},
            ["B", "paris", "I choose B"],
            ["A", "Rome", "C"],
        ),
        ("choice", {"answer": 0, "choices": ["4", "5"]}, ["A", "4"], ["B", "5", "0"]),
        (
            "choice",  # A letter is what the question shows, and texts have letters in them.
            {"answer": "Type A", "choices": ["A cat", "Type A", "Type B", "type b"]},
            ["B", "(B) Type A", "The answer is B. Type A.", "**B. type a**", "Type A"],
            ["A", "A. A cat", "C. Type B", "Type B", "type b", "D. type b"],
        ),
        ("choice", {"answer": 1, "choices": ["O", "A", "B"]}, ["B", "B. A"], ["A", "C"]),
        ("regex", {"pattern": r"^\d+ apples?$"}, ["3 apples", "1 apple"], ["apples", "3 pears"]),
    ],
)
def test_right_and_wrong_answers(how, row, right, wrong):
    score = make(how)
    score.check(row)
    assert [score(answer, row) for answer in right] == [1.0] * len(right)
    assert [score(answer, row) for answer in wrong] == [0.0] * len(wrong)


def test_a_pattern_that_takes_forever_does_not_match():
    assert make("regex")("a" * 60 + "!", {"pattern": "^(a|a)+$"}) == 0.0


def test_a_very_long_answer_is_wrong():
    assert make("exact")("7" + " " * scoring.MAX_ANSWER_LENGTH, {"answer": "7"}) == 0.0


@pytest.mark.parametrize(
    ("how", "row", "message"),
    [
        ("exact", {}, "answer is None"),
        ("exact", {"answer": " "}, "answer is ' '"),
        ("exact", {"answer": ["7"]}, r"answer is \['7'\]"),
        ("number", {"answer": "seven"}, "'seven', which has no number"),
        *(
            ("number", {"answer": answer}, "seems to be a part of one")
            for answer in ("3,5", "1 000", "2 3/4", "12:30", "1.234.567", "x^2", r"\frac{1}{2}")
        ),
        ("choice", {"answer": "Z"}, "names no choice; expected a letter of A to H"),
        ("choice", {"answer": "A", "choices": ["B", "A"]}, "may mean A or B"),
        ("choice", {"answer": 2, "choices": ["x", "y"]}, "names no choice"),
        ("choice", {"answer": "A", "choices": "x,y"}, "expected a list"),
        ("regex", {"answer": "7"}, "pattern is None"),
        ("regex", {"pattern": "(a"}, "no regular expression"),
    ],
)
def test_a_row_that_cannot_be_scored_is_an_error(how, row, message):
    with pytest.raises(scoring.RowError, match=message):
        make(how).check(row)


def test_the_question_lists_its_choices_and_never_the_answer():
    row = {"question": "The capital?", "choices": ["Rome", "Paris"], "answer": "Berlin"}
    assert scoring.asked(row) == "The capital?\nA. Rome\nB. Paris"
    with pytest.raises(scoring.RowError, match="question is None"):
        scoring.asked({"answer": 7})


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<think>3, or 4?</think>\n<answer> 5\n</answer>.", "5"),
        ("<answer>3</answer> or rather <answer>4", "4"),
        ("<think><answer>3</answer></think> It is 4.\n", "It is 4."),
        ("42", "42"),
        ("<think>3, or 4? <answer>3</answer> is", None),
    ],
)
def test_what_is_scored_of_a_reply(reply, answer):
    config = yaml.safe_load((shipped_dir("conf") / "env/questions.yaml").read_text())
    match = LimitedPattern(config["adapter"]["pattern"]).search(reply)
    assert (match and match["answer"]) == answer


def test_an_unknown_way_of_scoring_is_named():
    with pytest.raises(ValueError, match=r"'fuzzy': expected exact, number, choice, regex, math"):
        make("fuzzy")


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_named(limit_s):
    with pytest.raises(ValueError, match="QUESTIONS_LIMIT_S"):
        make("math", limit_s=limit_s)


# --- functions in processes -----------------------------------------------------------------------

FUNCTIONS = """
import os
import signal
import sys
def tenth(answer, row):
    print("this is not the score")
    return len(answer) / row["of"]
def endless(answer, row):
    while answer == "forever":
        pass
    return 1
def raises(answer, row):
    return float(answer)
def leaves(answer, row):
    os._exit(3)
def forks(answer, row):
    os.fork()
    signal.pause()
def reads(answer, row):
    return 1 + len(sys.stdin.read())
def quotes(answer, row):
    raise ValueError("x" * 10**7)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_scores.py").write_text(FUNCTIONS)
    return tmp_path


def test_a_function_sees_the_answer_and_the_whole_row(folder):
    score = make("my_scores:tenth", folder)
    row = {"answer": "x", "of": 10}
    score.check(row)
    assert [score(answer, row) for answer in ("", "abc", "ü" * 10)] == [0.0, 0.3, 1.0]


def test_a_function_that_takes_too_long_earns_nothing_and_the_next_answer_is_scored(folder):
    score = make("my_scores:endless", folder, limit_s=1.0)
    assert score("forever", {"answer": 1}) == 0.0
    assert make("my_scores:endless", folder)("now", {"answer": 1}) == 1.0


def test_processes_that_a_function_starts_end_with_it_and_read_no_rows(folder, caplog):
    assert make("my_scores:forks", folder, limit_s=1.0)("now", {"answer": 1}) == 0.0
    assert "my_scores:forks took longer than 1 s, so the answer 'now' earns 0" in caplog.text
    assert make("my_scores:reads", folder)("now", {"answer": 1}) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quotes", "failed on 'many': ValueError: x{500}$"),
        ("raises", "failed on 'many': ValueError: could not convert"),
        ("leaves", "failed on 'many': its process ended"),
        ("missing", "cannot be used: AttributeError"),
    ],
)
def test_a_function_that_fails_is_an_error(folder, name, message):
    score = make(f"my_scores:{name}", folder)
    for _ in range(2):
        with pytest.raises(scoring.ScoreError, match=message):
            score("many", {"answer": 1})


def test_a_missing_function_is_found_before_an_answer_is_scored(folder):
    with pytest.raises(scoring.ScoreError, match="No module named 'nowhere'"):
        make("nowhere:score", folder).check({"answer": 1})


# --- mathematical equality ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "answer", "score"),
    [
        ("1/2", "0.5", 1.0),
        ("1/2", "2", 0.0),
        (r"\frac{a}{2}", "a/2", 1.0),
        ("a/2", "2", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
        (r"\frac12", r"The answer is \boxed{0.5}.", 1.0),
        ("12", "so it is 12", 1.0),
        ("12", "12, or 13", 0.0),
        ("12", "", 0.0),
    ],
)
def test_equal_expressions(own, answer, score):
    pytest.importorskip("math_verify")
    from questions.math_answers import is_equal

    assert is_equal(answer, {"answer": own}) == score


def test_expressions_are_compared_in_a_process_too():
    pytest.importorskip("math_verify")
    score = make("math")
    assert [score(answer, {"answer": "1/3"}) for answer in (r"\frac{2}{6}", "0.3")] == [1.0, 0.0]
