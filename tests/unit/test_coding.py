"""The problems, scoring and policies of `coding`, without a server and without running programs."""

import hashlib
import random

import pytest
from coding import policies, problems, scoring
from coding.episode import Episode
from coding.problems import NUM_EXAMPLES, NUM_HIDDEN, SPLITS, Case
from coding.reply import MAX_CODE, MAX_REPLY, code_of
from coding.sandbox.outcome import LIMIT, NOT_LOADED, VIOLATION, Outcome, Result

EVERY = [problem for split in SPLITS for problem in problems.problems(split)]
TESTS = [Case(arguments=[n], expected=n % 2 == 0) for n in range(4)]


def test_splits_are_disjoint_and_the_order_of_tasks_never_changes():
    assert (problems.num_tasks("train"), problems.num_tasks("eval")) == (80, 27)
    assert len({problem.name for problem in EVERY}) == len(EVERY)
    names = " ".join(problem.name for problem in EVERY)
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "35ffc41e297f9d4e"


def test_the_tests_never_change():
    tests = repr([problem.tests() for problem in EVERY])
    assert hashlib.sha256(tests.encode()).hexdigest()[:16] == "169c41aad16ba319"


@pytest.mark.parametrize("problem", EVERY, ids=lambda problem: problem.name)
def test_a_problem_can_be_solved_and_is_told_in_full(problem):
    examples, hidden = problem.tests()
    assert (len(examples), len(hidden)) == (NUM_EXAMPLES, NUM_HIDDEN)
    assert len({repr(test.arguments) for test in examples + hidden}) == NUM_EXAMPLES + NUM_HIDDEN
    namespace: dict = {}
    exec(problem.solution, namespace)
    for test in examples + hidden:
        assert scoring.same(namespace[problem.function](*test.arguments), test.expected)
    assert problem.solution.startswith(problem.signature)
    assert repr(problem.value) in problem.statement
    assert "{" not in problem.statement and "\n" not in problem.statement


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("So:\n```python\ndef f(): pass\n```\nDone.", "def f(): pass\n"),
        ("```\ndef f(): pass\n```\n```\nf()\n```", "def f(): pass\n"),
        ("```py\ndef f(): pass", "def f(): pass"),
        ("```\n1\n```\n```\n2\n```", "2\n"),
        ("````python3 \r\ndef f(): pass\n````", "def f(): pass\n"),
        ("```java\n1\n``` ```\t py\n2\n", "2\n"),
        ("", ""),
    ],
)
def test_code_is_taken_from_its_fence(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [
        (1, 1, True),
        (True, 1, False),
        (1.0, 1, False),
        ([1, [2]], [1, [2]], True),
        ([1, [True]], [1, [1]], False),
        ([1], [1, 2], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1.0}, {"a": 1}, False),
        (None, 0, False),
    ],
)
def test_values_are_the_same_in_type_as_well(value, expected, is_same):
    assert scoring.same(value, expected) == is_same


def verdict_of(hidden: list[Result], examples: list[Result] | None = None) -> scoring.Verdict:
    shown = examples or [Result(value=test.expected) for test in TESTS[:2]]
    return scoring.judge(Outcome(results=[shown, hidden]), TESTS[:2], TESTS)


def test_the_score_is_what_the_readme_says():
    right = [Result(value=test.expected) for test in TESTS]
    wrong = [Result(value=None) for _ in TESTS]
    failing = [Result(error=("ValueError", "no"))] * len(TESTS)
    assert verdict_of(right).score == 1.0
    assert verdict_of(wrong).score == 0.2
    assert verdict_of(right[:2] + wrong[:2]).score == pytest.approx(0.35)
    assert verdict_of(failing).score == pytest.approx(0.1)
    assert verdict_of(right[:2] + failing[:2]).score == pytest.approx(0.25)
    assert verdict_of(wrong).tests_passed == 0 and not verdict_of(wrong).is_solved


def test_penalties_are_what_the_readme_says():
    for ending, penalty in ((VIOLATION, 0.5), (LIMIT, 0.1)):
        verdict = scoring.judge(Outcome(ending=ending, detail="why"), TESTS[:2], TESTS)
        assert (verdict.score, verdict.penalty, verdict.message) == (0.0, penalty, "why")
    error = Outcome(ending=NOT_LOADED, error=("SyntaxError", "line 1"))
    verdict = scoring.judge(error, TESTS[:2], TESTS)
    assert (verdict.score, verdict.penalty, verdict.error) == (0.0, 0.0, "SyntaxError")


def test_feedback_tells_of_examples_in_full_and_of_hidden_tests_a_builtin_class():
    failing = [Result(error=("ValueError", "secret"))] * len(TESTS)
    shown = verdict_of(failing, [Result(value=7), Result(error=("KeyError", "'told'"))])
    assert "With (0) it returned 7, not True." in shown.feedback
    assert (shown.error, shown.message) == ("KeyError", "'told'")
    hidden = verdict_of(failing)
    assert (hidden.error, hidden.message) == ("ValueError", "")
    own = verdict_of([Result(error=("Secret", "secret"))] * len(TESTS))
    assert own.error == "Exception"
    assert not any("ecret" in verdict.feedback for verdict in (shown, hidden, own))


def test_a_seed_fixes_the_problem():
    def draw(seed):
        return problems.choose_problem("train", None, seed)

    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).name for seed in range(50)}) > 25


@pytest.mark.parametrize("text", ["x" * (MAX_CODE + 1), "```\nx\n```" + " " * MAX_REPLY])
def test_endless_code_is_not_even_read(text):
    episode = Episode(problem=EVERY[0], attempts=1)
    assert episode.submit(text) == 0.0
    assert (episode.status, episode.verdict.error) == ("failed", "TooLong")


@pytest.mark.parametrize(
    "text",
    [
        "```" * 66_000,
        "```" + " " * 199_000,
        ("```" + " " * 20 + "\t" * 20) * 4_000,
        "```\n" * 50_000,
        ("```" + " " * 39 + "\n") * 4_000,
    ],
)
def test_code_is_found_in_linear_time(text):
    """The pattern that was here before took 45 s on 60,000 characters."""
    assert len(code_of(text)) <= len(text)


def observation_of(problem: problems.Problem) -> dict:
    examples, _ = problem.tests()
    calls = [
        {"call": f"f({', '.join(map(repr, test.arguments))})", "result": repr(test.expected)}
        for test in examples
    ]
    signature, statement = problem.signature, problem.statement
    return {"signature": signature, "statement": statement, "examples": calls, "attempt": 0}


def test_policies_write_programs_for_every_problem():
    rng = random.Random(0)
    for problem in EVERY:
        observations = [observation_of(problem)]
        assert policies.reference(observations, rng) == problem.solution
        for policy in (policies.from_examples, policies.random_guess):
            program = policy(observations, rng)
            compile(program, "program", "exec")
            assert program.startswith(problem.signature)


def test_the_policy_from_examples_finds_what_they_say():
    problem = next(problem for problem in EVERY if problem.name == "total_plus/0")
    program = policies.from_examples([observation_of(problem)], random.Random(0))
    assert "return sum(numbers)" in program
