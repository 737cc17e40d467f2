"""The score of an attempt and the feedback to its agent, as pure functions of the run's outcome."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .problems import Case
from .sandbox.outcome import LIMIT, NOT_LOADED, VIOLATION, Error, Outcome, Result

LOADED, RAN, SHARE, ALL = 0.1, 0.1, 0.3, 0.5  # they sum to 1.0
LIMIT_PENALTY, VIOLATION_PENALTY = 0.1, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Score and feedback of an attempt. `error` and `message` are empty if nothing was raised."""

    score: float = 0.0
    penalty: float = 0.0
    tests_passed: int = 0
    is_solved: bool = False
    is_violation: bool = False
    error: str = ""
    message: str = ""
    feedback: str = ""


def judge(outcome: Outcome, examples: Sequence[Case], hidden: Sequence[Case]) -> Verdict:
    """Return the verdict on a run whose two batches were the examples and the hidden tests."""
    if outcome.ending == VIOLATION:
        return Verdict(
            penalty=VIOLATION_PENALTY,
            is_violation=True,
            error="SandboxViolation",
            message=outcome.detail,
            feedback=f"The program was stopped for leaving the sandbox: {outcome.detail}.",
        )
    if outcome.ending == LIMIT:
        return Verdict(
            score=LOADED if outcome.results else 0.0,
            penalty=LIMIT_PENALTY,
            error="LimitExceeded",
            message=outcome.detail,
            feedback=f"The program was stopped at a limit: {outcome.detail}.",
        )
    if outcome.ending == NOT_LOADED:
        assert outcome.error is not None
        error, message = outcome.error
        feedback = f"The code could not be loaded. {error}: {message}"
        return Verdict(error=error, message=message, feedback=feedback)
    return _judge_results(outcome.results, examples, hidden)


def _judge_results(
    results: Sequence[Sequence[Result]], examples: Sequence[Case], hidden: Sequence[Case]
) -> Verdict:
    shown, secret = results
    num_passed = sum(_passes(result, test) for result, test in zip(secret, hidden, strict=True))
    has_run = not any(result.error for result in (*shown, *secret))
    is_solved = num_passed == len(hidden)
    score = LOADED + RAN * has_run + SHARE * num_passed / len(hidden) + ALL * is_solved
    error, message = _first_error(shown, secret)
    feedback = [f"{num_passed} of {len(hidden)} hidden tests passed."]
    feedback += [
        _describe(result, test)
        for result, test in zip(shown, examples, strict=True)
        if not _passes(result, test)
    ]
    if error and not any(result.error for result in shown):
        feedback.append(f"A hidden test raised {error}.")
    return Verdict(
        score=round(score, 6),
        tests_passed=num_passed,
        is_solved=is_solved,
        error=error,
        message=message,
        feedback="All hidden tests passed." if is_solved else " ".join(feedback),
    )


def same(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON's types are equal in value and type at every depth."""
    if type(value) is not type(expected):
        return False
    if type(value) is list:
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(value) is dict:
        return value.keys() == expected.keys() and all(
            same(item, expected[key]) for key, item in value.items()
        )
    return value == expected


def _passes(result: Result, test: Case) -> bool:
    return result.error is None and same(result.value, test.expected)


def _first_error(shown: Sequence[Result], secret: Sequence[Result]) -> Error:
    """Return class and message of an example's error, else only the class of a hidden test's.

    A message or a class defined by the program could reveal the hidden arguments.
    """
    for result in shown:
        if result.error:
            return result.error
    for result in secret:
        if result.error:
            is_builtin = hasattr(builtins, result.error[0])
            return (result.error[0] if is_builtin else "Exception"), ""
    return "", ""


def _describe(result: Result, test: Case) -> str:
    arguments = ", ".join(map(repr, test.arguments))
    if result.error:
        return f"With ({arguments}) it raised {result.error[0]}: {result.error[1]}"
    return f"With ({arguments}) it returned {shorten(result.value)}, not {test.expected!r}."


def shorten(value: Any) -> str:
    """Return the value's `repr`, cut to 200 characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value that nests too deep to be shown"
    return text if len(text) <= 200 else text[:197] + "..."
