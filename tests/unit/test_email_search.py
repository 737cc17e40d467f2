"""Email search's mailboxes, index, grading and episodes, without a server."""

import hashlib
import random
import re
from collections import Counter
from datetime import date

import pytest
from email_search import answers, mailbox, policies, tasks
from email_search.answers import AMOUNT, DATE, NUMBER, found_in
from email_search.episode import NO_CALLS_LEFT, Episode, OutOfTurn
from email_search.grading import RIGHT, UNKNOWN, WRONG, grade
from email_search.index import index
from email_search.kinds import KINDS
from email_search.mailbox import Question

BOX = mailbox.mailbox(0)


def test_mailboxes_never_change():
    boxes = repr([mailbox.mailbox(number) for number in (0, 1, 1000)])
    assert hashlib.sha256(boxes.encode()).hexdigest()[:16] == "84e52eaf30dd43d6"


@pytest.mark.parametrize("number", [0, 11, 1000, 1002])
def test_a_question_has_one_answer_and_its_source_says_it(number):
    box = mailbox.mailbox(number)
    by_id = {message.message_id: message for message in box.messages}
    assert len(by_id) == len(box.messages) == 320
    assert len({question.text for question in box.questions}) == mailbox.QUESTIONS_PER_MAILBOX
    for question in box.questions:
        body = by_id[question.source].body
        assert found_in(body, question.answer_kind, box.names) == {question.answer}


def test_the_last_message_about_a_fact_is_its_source():
    """No later message has all keys of a question and an answer of its kind."""
    by_id = {message.message_id: message for message in BOX.messages}
    num_updated = 0
    for question in BOX.questions:
        kind, keys = policies._understand(question.text)
        told = [
            message.message_id
            for message in BOX.messages
            if all(key in answers.plain(message.body) for key in keys)
            and any(_is_like(text, message.body, keys) for text in kind.texts + kind.updates)
        ]
        assert told[-1] == question.source
        num_updated += len(told) == 2
        assert by_id[question.source].time == max(by_id[each].time for each in told)
    assert num_updated == len(BOX.questions) // 2


def _is_like(text: str, body: str, keys: list[str]) -> bool:
    """Return whether the body contains the parts of the text between its placeholders."""
    parts = [answers.plain(part) for part in re.split(r"\{\w+\}", text)]
    return all(part in answers.plain(body) for part in parts)


def test_splits_have_no_mailbox_in_common_and_spread_over_theirs():
    assert not set(tasks.MAILBOXES["train"]) & set(tasks.MAILBOXES["eval"])
    assert (tasks.num_tasks("train"), tasks.num_tasks("eval")) == (960, 240)
    chosen = [tasks.choose_task("eval", index, None) for index in range(240)]
    assert len({(task.mailbox_number, task.question.text) for task in chosen}) == 240
    assert Counter(task.mailbox_number for task in chosen[:30]) == dict.fromkeys(
        tasks.MAILBOXES["eval"], 10
    )


def test_a_seed_fixes_the_task():
    assert tasks.choose_task("train", None, 7) == tasks.choose_task("train", None, 7)
    assert len({tasks.choose_task("train", None, seed).question.text for seed in range(50)}) > 40


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        (AMOUNT, "EUR 1,250.40", {125040}),
        (AMOUNT, "€1250.4 in all", {125040}),
        (AMOUNT, "1250.40 or 99", {125040, 9900}),
        (AMOUNT, "INV-1042 says 12", {1200}),
        (NUMBER, "extension 417.", {417}),
        (NUMBER, "417, 417", {417}),
        (DATE, "2025-03-14", {date(2025, 3, 14)}),
        (DATE, "on the 14th of March", {date(2025, 3, 14)}),
        (DATE, "March 14, 2025", {date(2025, 3, 14)}),
        (DATE, "Mar 14", {date(2025, 3, 14)}),
        (DATE, "14 March or 15 March", {date(2025, 3, 14), date(2025, 3, 15)}),
        (DATE, "2025-02-30", set()),
        ("room", "in room ELM", {"Elm"}),
        ("room", "elms", set()),
        ("room", "Elm or Fir", {"Elm", "Fir"}),
        ("hotel", "the old mill, in the centre", {"The Old Mill"}),
    ],
)
def test_answers_are_found_however_they_are_written(kind, text, found):
    assert found_in(text, kind, BOX.names) == found


def test_every_way_of_writing_an_answer_is_understood():
    rng = random.Random(0)
    for kind in KINDS:
        for _ in range(200):
            answer = answers.draw(kind.answer, BOX.names, rng)
            text = answers.write(kind.answer, answer, rng)
            assert found_in(text, kind.answer, BOX.names) == {answer}


@pytest.mark.parametrize(
    ("text", "cited", "verdict", "reward"),
    [
        ("14 March 2025", ["m001"], RIGHT, 1.0),
        ("14 March 2025", [], RIGHT, 0.8),
        ("14 March 2025", ["m001", "m002"], RIGHT, 0.9),
        ("14 March 2025", ["m001", "m001"], RIGHT, 1.0),
        ("14 March 2025", ["m002"], RIGHT, 0.8),
        ("14 or 15 March 2025 or 14 March", ["m001"], WRONG, -0.3),
        ("15 March 2025", [], WRONG, -0.5),
        ("no idea", [], WRONG, -0.5),
        ("I don't know.", [], UNKNOWN, 0.0),
        ("I don't know", ["m001"], UNKNOWN, 0.2),
        ("", [], UNKNOWN, 0.0),
        ("14 March 2025" + " " * 500, ["m001"], WRONG, -0.3),
    ],
)
def test_grades_are_what_the_readme_says(text, cited, verdict, reward):
    answer = date(2025, 3, 14)
    question = Question(text="When?", answer_kind=DATE, answer=answer, source="m001")
    given = grade(question, BOX, text, cited)
    assert (given.verdict, given.reward) == (verdict, pytest.approx(reward))


@pytest.mark.parametrize(
    "query", ["", '"', "NOT", "a AND (", "body:x*", "NEAR(a b)", "'; --", "x " * 10_000, "\x00é"]
)
def test_no_query_breaks_the_search(query):
    assert isinstance(index(0).search(query, 3), list)


def test_search_finds_words_in_any_form_and_prefers_all_of_them():
    message = BOX.messages[10]
    hits = index(0).search(message.subject, 10)
    assert message.message_id in [hit.message.message_id for hit in hits] or len(hits) == 10
    both = index(0).search("budget Heron", 5)
    assert both and all("Heron" in hit.message.body + hit.message.subject for hit in both)
    assert index(0).search("budgets", 5) == index(0).search("budget", 5)


def episode(**changes) -> Episode:
    return Episode(task=tasks.choose_task("train", 0, None), **({"max_calls": 2} | changes))


def test_calls_are_counted_and_one_too_many_ends_the_episode():
    playing = episode()
    assert NO_CALLS_LEFT not in playing.search("lunch", 5)
    assert NO_CALLS_LEFT in playing.read("m001")
    assert not playing.is_over
    with pytest.raises(OutOfTurn, match="2 calls"):
        playing.read("m002")
    assert playing.is_over and playing.grade is None
    with pytest.raises(OutOfTurn, match="over"):
        playing.answer("x", [])


def test_an_answer_costs_no_call_and_is_given_once():
    playing = episode(max_calls=1)
    playing.read("m999")
    playing.answer("I don't know", [])
    assert (playing.is_over, playing.grade.verdict) == (True, UNKNOWN)
    with pytest.raises(OutOfTurn):
        playing.answer("again", [])
