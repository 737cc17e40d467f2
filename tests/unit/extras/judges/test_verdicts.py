"""Verdicts on disk: what is asked once, and what again."""

import asyncio

from fakes import made_up_group

from openenv_pipe.extras.judges.verdicts import Verdicts
from openenv_pipe.rewards.values import scoring
from openenv_pipe.runs.paid_answers import FAILED

URL, BODY = "http://judge", {"messages": ["a"]}
FIRST, SECOND = made_up_group([], id="step 1/0"), made_up_group([], id="step 2/0")


def asked(verdicts, *answers, group=FIRST, body=BODY):
    """Ask the same question about a group three times at once; return the answers, and how often
    it was sent."""
    left = list(answers)

    async def ask():
        await asyncio.sleep(0)
        return left.pop(0)

    async def all_at_once():
        return await asyncio.gather(*(verdicts.answer(URL, body, ask) for _ in range(3)))

    with scoring(group):
        return asyncio.run(all_at_once()), len(answers) - len(left)


def test_equal_requests_are_sent_once_also_if_they_fail(tmp_path):
    failure = {FAILED: "broken"}
    assert asked(Verdicts(tmp_path), failure, {"value": 1}) == ([failure] * 3, 1)


def test_failures_with_which_a_run_goes_on_are_repeated(tmp_path):
    verdicts = Verdicts(tmp_path)
    asked(verdicts, {FAILED: "broken"})
    verdicts.settle({FIRST.id}, goes_on=True)
    assert asked(Verdicts(tmp_path), {"value": 1}) == ([{FAILED: "broken"}] * 3, 0)
    assert list(Verdicts(tmp_path).answers()) == [], "nothing was paid for"


def test_failures_about_other_groups_are_not_decided_on(tmp_path):
    """A step that is played ahead may still end the run, which then asks again."""
    verdicts, failure, good = Verdicts(tmp_path), {FAILED: "an outage"}, {"value": 1}
    other = {"messages": ["b"]}
    asked(verdicts, failure)
    asked(verdicts, failure, group=SECOND, body=other)
    verdicts.settle({FIRST.id}, goes_on=True)
    verdicts.settle({SECOND.id}, goes_on=False)
    assert asked(Verdicts(tmp_path), good) == ([failure] * 3, 0)
    assert asked(Verdicts(tmp_path), good, body=other) == ([good] * 3, 1)


def test_an_answer_that_nobody_can_read_is_kept_until_it_ends_a_run(tmp_path):
    verdicts, odd, good = Verdicts(tmp_path), {"value": "odd"}, {"value": 1}
    asked(verdicts, odd)
    with scoring(FIRST):
        for _ in range(2):  # two episodes have it
            verdicts.reject(URL, BODY)
    assert asked(verdicts, good) == ([odd] * 3, 0), "the step has no other answer"
    assert asked(Verdicts(tmp_path), good) == ([odd] * 3, 0), "nor has one that was killed"
    verdicts.settle({FIRST.id}, goes_on=False)
    assert asked(Verdicts(tmp_path), good) == ([good] * 3, 1)
    assert sorted(map(str, Verdicts(tmp_path).answers())) == sorted(map(str, [good, odd]))
    with scoring(FIRST):
        verdicts.reject(URL, {"messages": ["that nobody asked"]})
    verdicts.settle({FIRST.id}, goes_on=False)
