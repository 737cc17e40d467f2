"""Questions and scores of reasoning-gym, without a server."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("reasoning_gym")
from reasoning import policies, tasks
from reasoning_gym.factory import DATASETS

pytestmark = pytest.mark.slow

DEFAULTS = {"task": "leg_counting", "split": "train", "index": None, "seed": None}
SOME = ("leg_counting", "chain_sum", "knights_knaves", "maze", "basic_arithmetic")


def ask(**arguments: object) -> tasks.Question:
    return tasks.choose_question(**(DEFAULTS | arguments))


def right_answer(question: tasks.Question) -> str:
    return question._entry["answer"]


@pytest.mark.parametrize("task", SOME)
def test_the_library_scores_its_own_answers_and_questions_are_fixed(task):
    question = ask(task=task, index=3)
    assert question.text == ask(task=task, index=3, seed=1).text
    assert question.score(right_answer(question)) == 1.0
    assert question.score("no answer at all") < 0.2
    texts = {ask(task=task, index=i, split=s).text for i in range(20) for s in tasks.SPLIT_SEEDS}
    assert len(texts) > 30


def test_seeds_choose_among_the_questions_of_the_size():
    few = {ask(index=index, size=5).text for index in range(5)}
    assert {ask(seed=seed, size=5).text for seed in range(50)} == few
    assert ask(seed=4).text == ask(seed=4).text
    assert ask().text != ask().text


def test_splits_draw_from_seeds_that_are_further_apart_than_any_size():
    first, second = sorted(tasks.SPLIT_SEEDS.values())
    assert second - first > tasks.MAX_SIZE


def test_config_changes_the_questions():
    short = {"min_animals": 1, "max_animals": 1, "min_instances": 2, "max_instances": 2}
    question = ask(index=0, config=short)
    assert question.text.count(",") == 1
    assert right_answer(question) == right_answer(
        ask(index=0, config=dict(reversed(short.items())))
    )


def test_held_out_questions_are_never_asked_in_training():
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    given = {"task": "chain_sum", "config": sums, "holdout": 0.5, "size": 80}
    asked = {
        split: [ask(split=split, index=index, **given).text for index in range(80)]
        for split in tasks.SPLIT_SEEDS
    }
    assert len({*asked["train"], *asked["eval"]}) == 160
    assert asked["eval"][7] == ask(split="eval", index=7, **given).text
    with pytest.raises(ValueError, match=r"index: .* has only \d+ different questions for eval"):
        ask(split="eval", index=150, **given | {"size": 200})


def test_sessions_that_begin_at_once_look_for_held_out_questions_once(monkeypatch):
    drawn = []

    class Counted(tasks.Question):
        @property
        def text(self):
            drawn.append(threading.get_ident())
            return super().text

    monkeypatch.setattr(tasks, "Question", Counted)
    digits = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}
    together = threading.Barrier(8)

    def begin(index):
        together.wait(60)
        ask(task="chain_sum", config=digits, holdout=0.25, size=200, index=index)

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(begin, range(8)))
    assert drawn and len(set(drawn)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"task": "riddles"},
        {"task": ["maze"]},
        {"split": "test"},
        {"split": []},
        {"index": 1000},
        {"index": -1},
        {"index": True},
        {"seed": "seven"},
        {"size": 0},
        {"holdout": 1.0},
        {"holdout": "half"},
        {"size": 2**21},
        {"config": ["min_animals"]},
        {"config": {"seed": 3}},
        {"config": {"legs": 3}},
        {"config": {"min_animals": "three"}},
        {"config": {"min_animals": 9, "max_animals": 2}},
        {"task": "composite"},
    ],
)
def test_what_does_not_exist_is_named(arguments):
    (name, _), *_ = arguments.items()
    with pytest.raises(ValueError, match=name):
        ask(**arguments)


def test_answers_that_scorers_fail_on_earn_nothing():
    question = ask(task="prime_factorization", index=0)
    for answer in ("x × y", "\0", "9" * 100_000):
        assert question.score(answer) == 0.0


@pytest.mark.parametrize("task", sorted(tasks.EVALUATING_TASKS))
def test_tasks_whose_scorers_run_answers_are_rejected_unless_allowed(task, monkeypatch):
    with pytest.raises(ValueError, match=tasks.ALLOW_EVAL):
        ask(task=task, index=0)
    monkeypatch.setenv(tasks.ALLOW_EVAL, "1")
    assert ask(task=task, index=0).text


@pytest.mark.filterwarnings("ignore:loadtxt", "ignore:Exception ignored in:pytest.PytestWarning")
def test_no_other_scorer_runs_answers(tmp_path):
    """The list was written for one version of the library; this test inspects all its scorers
    again."""
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for task in sorted(set(DATASETS) - tasks.EVALUATING_TASKS - {"composite"}):
        question = ask(task=task, index=0)
        for answer in (code, f"[{code}]", f"[[{code}]]"):
            question.score(answer)
        assert not mark.exists(), task


def test_worked_solutions_are_right_and_wrong_questions_are_rejected():
    for index in range(200):
        question = ask(task="chain_sum", index=index, config={"min_terms": 1, "max_digits": 2})
        worked = policies.step_by_step([{"question": question.text}], random.Random(0))
        assert question.score(worked.split(" = ")[-1]) == 1.0
    assert policies.step_by_step([{"question": "4 - 8 + 9 - 3 ="}], random.Random(0)) == (
        "4 - 8 + 9 - 3 = -4 + 9 - 3 = 5 - 3 = 2"
    )
    with pytest.raises(ValueError, match="a sum of whole numbers was expected"):
        policies.step_by_step([{"question": "How many legs?"}], random.Random(0))


def test_guesses_are_no_oracles():
    rng = random.Random(0)
    for policy in (policies.constant, policies.number_of_question):
        questions = [ask(index=index) for index in range(100)]
        answers = [policy([{"question": question.text}], rng) for question in questions]
        scores = [q.score(answer) for q, answer in zip(questions, answers, strict=True)]
        assert sum(scores) < 10
