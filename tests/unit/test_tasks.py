"""Task sets, the separation of splits, and the task orders of training."""

import asyncio
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from fakes import run_config
from pydantic import ValidationError

from openenv_pipe.commands.findings import Result
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import PythonOrderConfig
from openenv_pipe.environments.tasks import (
    RangeTasks,
    Splits,
    build_order,
    known_splits,
    open_splits,
    read_known_sets,
    split_warnings,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.check.environment import label_lines
from openenv_pipe.system.http import OPEN
from openenv_pipe.types import Episode, Finish, Group, Status, Turn

RANGE = compose(["conf=echo"]).config.env.tasks.train


def file_block(path, **changes):
    block = {"type": "file", "path": str(path), "columns": None, "required": [], "labels": []}
    return block | {"seed_start": None, "reset": {}} | changes


def configured(train, evaluation, num_eval_tasks=1):
    """Compose an experiment with these two blocks."""
    config = compose(["conf=echo", f"eval.num_tasks={num_eval_tasks}"]).config
    tasks = {"order": "shuffle", "train": train, "eval": evaluation}
    values = config.model_dump()
    values["env"]["tasks"] = tasks
    return type(config).model_validate(values)


async def splits(config):
    return await open_splits(config, known_splits(config), "http://unused", OPEN)


def write(path, *rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def rejection(config):
    with pytest.raises(ConfigError) as caught:
        read_known_sets(config.env.tasks)
    return str(caught.value)


# --- files -------------------------------------------------------------------------------------


async def test_columns_of_a_file_become_reset_keywords(tmp_path):
    train = write(tmp_path / "a.jsonl", {"question": "2+2?", "level": 3}, "", {"question": "1?"})
    held_out = write(tmp_path / "b.csv", "q,n,text", '"a, b",7,007', "c,2.5,true")
    config = configured(
        file_block(train, reset={"split": "x"}, seed_start=40),
        file_block(held_out, columns={"q": "question", "n": "level"}),
    )
    found = await splits(config)
    assert [len(found.train), len(found.eval)] == [2, 2]
    first, last = found.train[0], found.train[1]
    assert (first.id, first.index, first.seed) == ("train/0", 0, 40)
    assert first.reset == {"split": "x", "question": "2+2?", "level": 3}
    assert (last.seed, last.reset) == (41, {"split": "x", "question": "1?"})
    assert [task.reset for task in (found.eval[0], found.eval[1])] == [
        {"question": "a, b", "level": 7},
        {"question": "c", "level": 2.5},
    ]
    assert found.eval[0].seed == found.eval[1].seed == 0
    with pytest.raises(IndexError):
        found.train[2]


LABELLED = ({"q": "1+1?", "tier": 2, "topic": "sums"}, {"q": "1?", "tier": None, "topic": "other"})


def test_labels_are_columns_that_reset_does_not_get(tmp_path):
    path = write(tmp_path / "a.jsonl", *LABELLED)
    block = file_block(path, labels=["tier", "topic"])
    tasks = read_known_sets(configured(block, RANGE.model_dump()).env.tasks)["train"]
    assert [task.reset for task in tasks] == [{"q": "1+1?"}, {"q": "1?"}]
    assert [task.labels for task in tasks] == [{"tier": "2", "topic": "sums"}, {"topic": "other"}]
    share = {"type": "share", "share": 0.5, "by": None}
    known = read_known_sets(configured(block, share).env.tasks)
    assert {task.labels["topic"] for tasks in known.values() for task in tasks} == {"sums", "other"}


def test_check_counts_the_tasks_of_each_label_in_both_splits(tmp_path):
    rows = [{"q": number, "topic": "ab"[number % 5 == 0]} for number in range(20)]
    block = file_block(write(tmp_path / "a.jsonl", *rows), labels=["topic"])
    config = configured(block, {"type": "share", "share": 0.25, "by": None})
    known = read_known_sets(config.env.tasks)
    num_b = sum(task.labels["topic"] == "b" for task in known["eval"])
    (line,) = label_lines(config, Splits(**known))
    assert (line.name, line.result) == ("tasks by topic", Result.OK)
    assert line.text.startswith(f"training: a {11 + num_b}, b {4 - num_b}; evaluation: ")
    unlabelled = configured(block | {"labels": []}, {"type": "share", "share": 0.25, "by": None})
    assert [*label_lines(unlabelled, Splits(**known))] == []


def test_a_label_that_columns_names_is_also_a_reset_keyword(tmp_path):
    path = write(tmp_path / "a.csv", "q,tier,topic", "1+1?,easy,sums")
    block = file_block(path, labels=["tier"], columns={"q": "question", "tier": "difficulty"})
    (task,) = read_known_sets(configured(block, RANGE.model_dump()).env.tasks)["train"]
    assert task.reset == {"question": "1+1?", "difficulty": "easy"}
    assert task.labels == {"tier": "easy"}


def test_labels_of_a_data_set_are_no_columns_of_reset(tmp_path):
    path = write(tmp_path / "a.jsonl", *LABELLED)
    block = dataset_block(path="json", data_files=str(path), labels=["topic"])
    tasks = read_known_sets(configured(block, RANGE.model_dump()).env.tasks)["train"]
    assert tasks[0].reset == {"q": "1+1?", "tier": 2}
    assert tasks[0].labels == {"topic": "sums"}
    missing = configured({**block, "labels": ["level"]}, RANGE.model_dump())
    assert "has no column 'level'; it has q, tier, topic" in rejection(missing)


def test_a_label_that_is_missing_or_no_text_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", *LABELLED, {"q": "2?", "tier": [1]})
    other = RANGE.model_dump()
    listed = rejection(configured(file_block(path, labels=["tier"]), other))
    assert "line 3: 'tier' is [1], and env.tasks.train.labels expects text" in listed
    missing = rejection(configured(file_block(path, labels=["topic"]), other))
    assert "line 3 has no 'topic', which env.tasks.train.labels names; it has q, tier" in missing
    with pytest.raises(ValidationError, match="labels names the column 'seed'"):
        configured(file_block(path, labels=["seed"]), other)


async def test_sub_folders_are_tasks_named_after_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train/b", "train/a", "train/.git", "train/no_task", "eval/c"):
        (tmp_path / name).mkdir(parents=True)
        if not name.endswith("no_task"):
            (tmp_path / name / "task.toml").touch()
    block = {"type": "folders", "contains": "task.toml", "seed_start": None, "reset": {}}
    train = {**block, "path": "train"}
    config = configured(train, {**block, "path": str(tmp_path / "eval")})
    known = await splits(config)
    assert [task.id for task in known.train] == ["train/a", "train/b"]
    assert [task.reset for task in known.train] == [{"path": "train/a"}, {"path": "train/b"}]
    assert [task.reset for task in known.eval] == [{"path": "eval/c"}]
    missing = configured({**train, "path": "nowhere"}, train)
    assert "env.tasks.train.path='nowhere'" in rejection(missing)
    empty = configured({**train, "contains": "other.toml"}, train)
    assert "no sub-folder with a file other.toml" in rejection(empty)


NOT_NUMBERS = ("1.10", "1e5", "null", " 5", "-0", "007", "1_000", "+1", "NaN", "inf", "1e400", "")
NOT_HELD = ("12345678901234567.25", "9007199254740993", "9" * 5000, "\u0661", "True", "None", "[1]")


@pytest.mark.parametrize("cell", [*NOT_NUMBERS, *NOT_HELD])
def test_a_csv_column_keeps_its_cells_unless_all_print_back(tmp_path, cell):
    path = write(tmp_path / "a.csv", "q,n,mixed", f"a,7,2.5\nb,8,{cell}")
    tasks = read_known_sets(configured(file_block(path), RANGE.model_dump()).env.tasks)["train"]
    assert [task.reset for task in tasks] == [
        {"q": "a", "n": 7, "mixed": "2.5"},
        {"q": "b", "n": 8, "mixed": cell},
    ]


def test_a_csv_column_of_numbers_or_booleans_has_its_type(tmp_path):
    path = write(
        tmp_path / "a.csv",
        "n,share,yes,text,quoted",
        '-7,2.5,true,true,"""x"""',
        "0,-0.0,false,yes,",
        "12,1e+16,true,1,",
    )
    tasks = read_known_sets(configured(file_block(path), RANGE.model_dump()).env.tasks)["train"]
    columns = list(zip(*(task.reset.values() for task in tasks), strict=True))
    assert columns[:3] == [(-7, 0, 12), (2.5, -0.0, 1e16), (True, False, True)]
    assert columns[3:] == [("true", "yes", "1"), ('"x"', "", "")]
    assert json.dumps(columns[1][1]) == "-0.0"


def test_encodings_and_line_ends_of_a_file(tmp_path):
    path = tmp_path / "a.csv"

    def rows():
        tasks = read_known_sets(configured(file_block(path), RANGE.model_dump()).env.tasks)
        return [task.reset for task in tasks["train"]]

    path.write_bytes('\ufeffq,n\r\n"a\r\nb\u2028",1\r\n'.encode())
    assert rows() == [{"q": "a\r\nb\u2028", "n": 1}]
    path.write_text(f"q\n{'x' * 200_000}\n")
    assert len(rows()[0]["q"]) == 200_000
    path.write_bytes("q\na\n\xe9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"line 3 is not UTF-8 \(byte 0xe9\)"):
        rows()
    path.write_text(" q\n1\n")
    with pytest.raises(ConfigError, match=r"line 1 names a column ' q'"):
        rows()
    lines = write(tmp_path / "a.jsonl", r'{"q": "\ud83d\ude00", "n": 0.10000000000000001}')
    path = lines
    assert rows() == [{"q": "\U0001f600", "n": 0.1}]


def test_a_file_that_is_missing_is_answered_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", {"q": 1})
    message = rejection(configured(file_block("sum.jsonl"), RANGE.model_dump()))
    assert f"no file sum.jsonl in {tmp_path} (did you mean sums.jsonl?)" in message
    message = rejection(configured(file_block("data/sums.jsonl"), RANGE.model_dump()))
    assert f"no folder {tmp_path}/data" in message


def test_two_columns_cannot_become_one_keyword(tmp_path):
    path = write(tmp_path / "a.csv", "a,b", "1,2")
    message = rejection(
        configured(file_block(path, columns={"a": "x", "b": "x"}), RANGE.model_dump())
    )
    assert "maps a and b to the reset keyword 'x'" in message and "line 2 has no" not in message


def test_a_misspelt_column_is_named_before_the_keyword_that_two_columns_become(tmp_path):
    path = write(tmp_path / "a.csv", "text,label", "hello,billing")
    columns = {"text": "question", "label": "answer", "txt": "question"}
    message = rejection(configured(file_block(path, columns=columns), RANGE.model_dump()))
    missing, _, merged = message.partition("; env.tasks.train.columns")
    assert missing.endswith("line 2 has no column 'txt'; it has text, label")
    assert "'~env.tasks.train.columns.text' takes a column away" in merged


def test_a_seed_of_a_row_is_the_tasks_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", {"seed": 9, "q": 1}, {"seed": "x"}, {"q": 2})
    train = read_known_sets(configured(file_block(path), RANGE.model_dump()).env.tasks)["train"]
    assert (train[0].seed, train[0].reset) == (9, {"q": 1})
    assert train[2].seed == 0
    with pytest.raises(ConfigError, match=r"row 2 .*seed='x'"):
        train[1]


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("a.jsonl", ["{"], ["env.tasks.train.path", "line 1 is not JSON"]),
        ("a.jsonl", [{"q": 1}, "[1]"], ["line 2 is [1], expected a JSON object"]),
        ("a.jsonl", [], ["has no rows"]),
        ("a.jsonl", [{"q": 1}, {"r": 1}], ["line 2 has no column 'q'; it has r"]),
        ("a.csv", ["q,r", "1"], ["line 2: the number of cells is 1, expected 2"]),
        ("a.csv", ["q", "1,2"], ["line 2: the number of cells is 2, expected 1"]),
        ("none.jsonl", None, ["there is no file none.jsonl in"]),
        (
            "a.jsonl",
            [{"q": 1}, r'{"q": ["\ud800"]}'],
            ["a.jsonl, line 2, column 'q'", "cannot be sent"],
        ),
        ("a.jsonl", ['{"q": ' + "[" * 70 + "]" * 70 + "}"], ["line 1, column 'q'", "64 levels"]),
        ("a.jsonl", ['{"q": ' + "[" * 10**5], ["line 1"]),
        ("a.jsonl", ['{"q": 1, "q": 2}'], ["line 1: 'q' occurs twice in one object"]),
        ("a.jsonl", ['{"q": NaN}'], ["line 1: NaN is not JSON"]),
        ("a.jsonl", ['{"q": 1e-9999999999999999999999}'], ["line 1: 1e-9999999"]),
        ("a.jsonl", ['{"q": 1e400}'], ["line 1: 1e400 would become inf"]),
        ("a.jsonl", ['{"q": 12345678901234567.25}'], ["line 1: 12345678901234567.25", "in quotes"]),
        ("a.csv", ["q,q", "1,2"], ["line 1 names the column 'q' twice"]),
        ("a.csv", ["q;r", "1;2"], ["line 1 is separated by ';'"]),
        ("a.csv", ["q", '"1', "2"], ["line 3 is not CSV"]),
    ],
)
def test_a_file_that_is_not_as_said_is_explained(tmp_path, name, rows, expected):
    path = tmp_path / name
    if rows is not None:
        write(path, *rows)
    message = rejection(configured(file_block(path, columns={"q": "q"}), RANGE.model_dump()))
    assert [part for part in expected if part not in message] == []


# --- data sets ---------------------------------------------------------------------------------


def dataset_block(**changes):
    block = dict.fromkeys(("config", "revision", "data_files", "columns", "seed_start"))
    return block | {
        "type": "dataset",
        "split": "train",
        "required": [],
        "labels": [],
        "reset": {},
        **changes,
    }


async def test_a_local_data_set_is_read_by_split_and_column(tmp_path, monkeypatch):
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write(tmp_path / "a.jsonl", *({"q": f"q{i}", "answer": i} for i in range(10)))
    block = dataset_block(path="json", data_files=str(path), columns={"q": "question"})
    config = configured(block | {"split": "train[:80%]"}, block | {"split": "train[80%:]"})
    found = await splits(config)
    assert [len(found.train), len(found.eval)] == [8, 2]
    assert found.eval[1].reset == {"question": "q9"}
    overlapping = configured(block, block | {"split": "train[80%:]"})
    with pytest.raises(ConfigError, match=r"share tasks: row 9 .* row 1 .*q8"):
        await splits(overlapping)
    assert "no column 'x'; it has q, answer" in rejection(
        configured(block | {"columns": {"x": "x"}}, block)
    )
    assert "cannot load data set" in rejection(configured(block | {"split": "test"}, block))


def test_a_data_set_of_csv_files_keeps_its_cells(tmp_path, monkeypatch):
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    long = "x" * 200_000
    path = write(
        tmp_path / "a.csv",
        "text,n,share,yes",
        "007,1,2.5,true",
        "NA,2,0.5,false",
        f"{long},3,1.5,true",
    )
    block = dataset_block(path="csv", data_files=str(path))
    tasks = read_known_sets(configured(block, RANGE.model_dump()).env.tasks)["train"]
    assert [task.reset for task in tasks] == [
        {"text": "007", "n": 1, "share": 2.5, "yes": True},
        {"text": "NA", "n": 2, "share": 0.5, "yes": False},
        {"text": long, "n": 3, "share": 1.5, "yes": True},
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b", "1,2,3", "4,5,6"], "Length of header or names does not match length of data"),
        (["a,b", "1,2", "4,5,6"], "Expected 2 fields in line 3, saw 3"),
        (["a,b", "1,2", "4"], "row 2 has fewer cells than the header"),
        (["a\tb", "1\t2"], r"line 1 is separated by '\t', expected commas: 'a\tb'"),
    ],
)
def test_a_row_of_a_data_set_of_csv_files_has_a_cell_for_each_column(
    lines, message, tmp_path, monkeypatch
):
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write(tmp_path / "a.csv", *lines)
    block = dataset_block(path="csv", data_files=str(path))
    assert message in rejection(configured(block, RANGE.model_dump()))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = rejection(configured(dataset_block(path="json"), RANGE.model_dump()))
    assert "[datasets]" in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "2?"}, "line 3 gives no 'answer', which env.tasks.train.required asks for; its col"),
        ({"q": "2?", "answer": None}, "line 3: 'answer' is None"),
        ({"q": "", "answer": 2}, "line 3: 'q' is ''"),
        ({"q": "2?", "answer": " \t"}, r"line 3: 'answer' is ' \t'"),
        ({"q": "2?", "answer": []}, "line 3: 'answer' is []"),
    ],
)
def test_a_row_without_a_required_value_is_named(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", {"q": "1?", "answer": 0}, {"q": "0?", "answer": False}, row)
    block = file_block(path, required=["q", "answer"])
    assert message in rejection(configured(block, RANGE.model_dump()))


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        (None, "its columns are prompt, a; env.tasks.train.columns={COLUMN: answer} names the col"),
        (
            {"prompt": "question"},
            "only what it lists; set it to {prompt: question, COLUMN: answer}",
        ),
        ({"prompt": "q", "a": "b"}, "set it to {prompt: q, a: b, COLUMN: answer}"),
    ],
)
def test_columns_that_leave_out_a_required_keyword_are_completed(tmp_path, columns, advice):
    path = write(tmp_path / "a.jsonl", {"prompt": "1?", "a": "1"})
    block = file_block(path, required=["answer"], columns=columns)
    assert advice in rejection(configured(block, RANGE.model_dump()))


def test_columns_that_leave_out_a_column_of_the_required_name_name_it(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1?", "answer": "1"})
    block = file_block(path, required=["question", "answer"], columns={"prompt": "question"})
    message = rejection(configured(block, RANGE.model_dump()))
    assert "passes on only what it lists; set it to {prompt: question, answer: answer}" in message


def test_a_row_of_a_data_set_without_a_required_value_is_named(tmp_path, monkeypatch):
    pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write(tmp_path / "a.jsonl", {"q": "1?", "a": "1"}, {"q": "2?", "a": ""})
    block = dataset_block(path="json", data_files=str(path), required=["question", "answer"])
    assert "row 1 gives no 'question'" in rejection(configured(block, RANGE.model_dump()))
    block["columns"] = {"q": "question"}
    message = rejection(configured(block, RANGE.model_dump()))
    assert "its columns are q, a; env.tasks.train.columns passes on only what it lists" in message
    block["columns"] = {"q": "question", "a": "answer"}
    assert "row 2: 'answer' is ''" in rejection(configured(block, RANGE.model_dump()))


# --- splits ------------------------------------------------------------------------------------

SHARE = {"type": "share", "share": 0.25, "by": None}


async def test_a_share_of_the_rows_is_left_for_the_evaluation(tmp_path):
    rows = [{"q": number} for number in range(40)]
    path = write(tmp_path / "a.jsonl", *rows)
    found = await splits(configured(file_block(path), SHARE))
    assert [len(found.train), len(found.eval)] == [30, 10]
    trained, held_out = ([task.reset["q"] for task in each] for each in (found.train, found.eval))
    assert sorted(trained + held_out) == list(range(40))
    assert trained == sorted(trained) and held_out != list(range(30, 40))
    first = found.eval[0]
    assert (first.id, first.split, first.index) == (f"eval/{held_out[0]}", "eval", 0)
    write(path, *reversed(rows))
    for seed_start in (None, 7):
        again = await splits(configured(file_block(path, seed_start=seed_start), SHARE))
        assert {task.reset["q"] for task in again.eval} == set(held_out)


async def test_equal_rows_are_in_one_part(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"q": number % 4} for number in range(40)))
    for seed_start in (None, 7):
        found = await splits(configured(file_block(path, seed_start=seed_start), SHARE))
        assert [len(found.train), len(found.eval)] == [30, 10]
        assert len({task.reset["q"] for task in found.eval}) == 1


async def test_all_rows_of_a_question_are_in_one_part(tmp_path):
    rows = [{"question": f"{n % 100}?", "answer": n % 7, "source": n} for n in range(200)]
    path = write(tmp_path / "a.jsonl", *rows)
    by = {"train": file_block(path), "evaluation": SHARE | {"by": "question"}}
    found = await splits(configured(**by))
    trained, held_out = (
        [task.reset["question"] for task in each] for each in (found.train, found.eval)
    )
    assert len(held_out) == 50 and len(trained) == 150
    assert not set(trained) & set(held_out)
    assert found.train.source.endswith("100 of 200 rows repeat the question of another")
    write(path, *reversed(rows))
    again = await splits(configured(**by))
    assert {task.reset["question"] for task in again.eval} == set(held_out)


async def test_questions_that_do_not_repeat_are_divided_as_rows_are(tmp_path):
    rows = [{"question": f"{n}?", "answer": n} for n in range(40)]
    rows += rows[:3]  # equal rows do not change it
    path = write(tmp_path / "a.jsonl", *rows)
    parts = [
        [task.reset for task in (await splits(configured(file_block(path), share))).eval]
        for share in (SHARE, SHARE | {"by": "question"})
    ]
    assert parts[0] == parts[1]


def test_a_row_without_what_a_share_is_undivided_by_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "1?"}, {"prompt": "2?"})
    message = rejection(configured(file_block(path), SHARE | {"by": "question"}))
    assert "env.tasks.eval.by='question': row 2 of" in message and "it has prompt" in message


def test_a_share_that_leaves_nothing_is_rejected(tmp_path):
    path = write(tmp_path / "a.jsonl", {"q": 1}, {"q": 1})
    assert "none for the evaluation" in rejection(configured(file_block(path), SHARE))
    block = file_block(path)
    assert "none for training" in rejection(configured(block, SHARE | {"share": 1.0}))


@pytest.mark.parametrize("train", [RANGE.model_dump(), None])
def test_only_listed_training_tasks_are_divided(train):
    if train is None:
        train = {"type": "server", "split": "train", "seed_start": None, "reset": {}}
    with pytest.raises(ValidationError, match=f"whose type is {train['type']}"):
        configured(train, SHARE)


def test_training_tasks_are_no_share():
    with pytest.raises(ValidationError, match="'share'"):
        configured(SHARE, RANGE.model_dump())


async def test_a_task_in_both_splits_is_rejected_with_an_example(tmp_path):
    train = write(tmp_path / "a.jsonl", {"q": 1}, {"q": 2, "n": 1})
    held_out = write(tmp_path / "b.jsonl", {"q": 3}, {"n": 1, "q": 2})
    with pytest.raises(ConfigError, match=r"row 2 of .*a\.jsonl and row 2 of .*b\.jsonl.*\"q\": 2"):
        await splits(configured(file_block(train), file_block(held_out)))
    await splits(configured(file_block(train), file_block(held_out, reset={"split": "eval"})))
    await splits(configured(file_block(train), file_block(held_out, seed_start=1)))
    with pytest.raises(ConfigError, match="share tasks"):
        train.write_text('{"index": 3, "seed": 5}\n')
        range_block = RANGE.model_dump() | {"seed_start": 2, "reset": {}, "num_tasks": 4}
        await splits(configured(file_block(train), range_block))


async def test_eval_tasks_with_the_question_of_a_training_task_are_counted(tmp_path):
    rows = [{"q": f"{number}+1", "answer": number + 1} for number in range(4)]
    train = write(tmp_path / "a.jsonl", *rows)
    spelled = [{**row, "answer": str(row["answer"])} for row in rows[2:]]
    held_out = write(tmp_path / "b.jsonl", {"q": "other", "answer": 3}, *spelled)

    async def shared(train, held_out):
        config = configured(train, held_out)
        return next(iter(split_warnings(config.env.tasks, await splits(config))), None)

    required = ["q", "answer"]
    text = await shared(file_block(train, required=required), file_block(held_out))
    assert text.startswith("2 of 3 eval tasks have the q of a training task")
    assert 'eval/1 and train/2 have "2+1"' in text
    assert f"remove them from one of {train} and {held_out}" in text
    assert await shared(file_block(train), file_block(held_out)) is None
    other = write(tmp_path / "c.jsonl", {"q": "other", "answer": 3})
    assert await shared(file_block(train, required=required), file_block(other)) is None

    write(train, *({"q": "1+1", "answer": str(number)} for number in range(9)))
    text = await shared(file_block(train, required=required), SHARE)
    assert text.endswith("set env.tasks.eval.by=q")
    assert await shared(file_block(train, required=["answer", "q"]), SHARE) is None


def test_labels_that_no_eval_task_has_are_named(tmp_path):
    topics = ["sums"] * 3 + ["shapes"] * 2 + ["time"]
    rows = [{"q": number, "topic": topic} for number, topic in enumerate(topics)]
    train = file_block(write(tmp_path / "a.jsonl", *rows), labels=["topic"])

    def warnings(held_out):
        config = configured(train, held_out)
        known = Splits(**read_known_sets(config.env.tasks))
        return split_warnings(config.env.tasks, known)

    held_out = write(tmp_path / "b.jsonl", {"q": 7, "topic": "sums"}, {"q": 8, "topic": "new"})
    (text,) = warnings(file_block(held_out, labels=["topic"]))
    assert text.startswith("no eval task has the topic 'shapes', 'time', which 3 of 6 training ")
    assert text.endswith(f"add rows of it to {held_out}")
    assert warnings(file_block(held_out)) == [], "the eval tasks have no labels"
    (text,) = warnings(SHARE | {"share": 0.17})
    assert text.endswith("raise env.tasks.eval.share=0.17")
    write(held_out, *({"q": 9 + number, "topic": each} for number, each in enumerate(topics)))
    assert warnings(file_block(held_out, labels=["topic"])) == []


def test_values_of_another_type_in_the_eval_split_are_named(tmp_path):
    train = write(tmp_path / "a.csv", "q,answer,n", "1+1,2,1", "2+2,4,2")
    held_out = write(tmp_path / "b.csv", "q,answer,n", "3+3,6,3", "4+4,008,4")
    config = configured(file_block(train), file_block(held_out))
    (text,) = split_warnings(config.env.tasks, Splits(**read_known_sets(config.env.tasks)))
    assert text.startswith("the reset keyword 'answer' is a number in all training tasks, and text")
    assert text.endswith(f"write 'answer' in {train} and {held_out} alike")


async def test_more_tasks_than_the_evaluation_has_are_rejected(tmp_path):
    path = write(tmp_path / "a.jsonl", {"q": 1}, {"q": 2})
    with pytest.raises(
        ConfigError, match=r"eval\.num_tasks=3 is more than the 2 tasks of .*a\.jsonl"
    ):
        await splits(configured(RANGE.model_dump(), file_block(path), num_eval_tasks=3))


def test_a_value_that_is_no_json_is_rejected(tmp_path):
    from openenv_pipe.environments.tasks.splits import _identity

    task = SimpleNamespace(seed=0, reset={"image": b""}, id="train/3", split="train")
    with pytest.raises(ConfigError, match=r"train/3, column 'image'.*env\.tasks\.train\.columns"):
        _identity(task)


def test_a_type_is_chosen_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "mine.yaml").write_text(
        "defaults: [echo, override tasks@tasks.train: file, _self_]\nname: mine\n"
        "tasks: {order: curriculum, train: {path: rows.jsonl}}\n"
    )
    (tmp_path / "conf" / "env" / "own.yaml").write_text(
        "defaults:\n  - base\n  - override tasks@tasks.train: file\n"
        "  - override tasks@tasks.eval: server\n  - _self_\n"
        "name: own\npackage: echo\nmax_episode_tokens: 512\n"
        "adapter: {first: a, following: a, pattern: '(?P<message>.*)'}\n"
        "tasks: {train: {path: rows.jsonl}, eval: {split: eval}}\n"
    )
    tasks = compose(["conf=echo", "env=own"]).config.env.tasks
    assert (tasks.train.type, tasks.train.path, tasks.train.seed_start) == (
        "file",
        "rows.jsonl",
        None,
    )
    assert (tasks.eval.type, tasks.order) == ("server", "shuffle")
    with pytest.raises(ConfigError, match=r"num_tasks.*not a key of this type"):
        compose(["conf=echo", "env=mine"])  # echo's own splits are ranges


# --- orders ------------------------------------------------------------------------------------


def indices(order, start, count):
    return [task.index for task in order.take(start, count)]


def tasks_of(num_tasks):
    return RangeTasks("train", RANGE.model_copy(update={"num_tasks": num_tasks}))


def played(task, successes, num_tokens=1):
    """Return a group with these successes; None marks a failed episode."""
    turn = Turn(
        prompt_ids=[0] * num_tokens,
        completion_ids=[],
        logprobs=[],
        finish=Finish.STOP,
        policy_versions=[0],
        reply="",
    )
    episodes = [
        Episode(
            task=task,
            member=member,
            seed=0,
            turns=[turn],
            success=bool(success),
            status=Status.ERROR if success is None else Status.DONE,
        )
        for member, success in enumerate(successes)
    ]
    return Group(id="x", task=task, episodes=episodes)


def test_every_pass_has_every_task():
    listed = build_order("seed", tasks_of(5), 7)
    assert indices(listed, 3, 7) == [3, 4, 0, 1, 2, 3, 4]
    shuffled = build_order("shuffle", tasks_of(5), 7)
    first, second = indices(shuffled, 0, 5), indices(shuffled, 5, 5)
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second
    assert indices(shuffled, 2, 6) == (first + second)[2:8]
    assert first != indices(build_order("shuffle", tasks_of(5), 8), 0, 5)
    assert indices(build_order("shuffle", tasks_of(6), 0), 0, 6) == [1, 5, 0, 4, 3, 2]


def test_a_curriculum_begins_with_every_task_once():
    order = build_order("curriculum", tasks_of(12), 0)
    seen = []
    for start in (0, 4, 8):
        tasks = order.take(start, 4)
        seen += [task.index for task in tasks]
        order.record([played(task, [False, False]) for task in tasks])
    assert sorted(seen) == list(range(12))
    # the tasks whose last play is longest ago
    assert sorted(indices(order, 12, 4)) == sorted(seen[:4])
    assert sorted(Counter(indices(order, 0, 30)).values()) == [2] * 6 + [3] * 6


def test_a_curriculum_prefers_what_is_solved_at_times():
    tasks = tasks_of(100)
    order = build_order("curriculum", tasks, 0)
    at_times = set(range(0, 100, 5))
    for index in range(100):
        order.record([played(tasks[index], [index in at_times, False])])
    taken = Counter(index for start in range(0, 200, 8) for index in indices(order, start, 8))
    assert sum(taken[index] for index in at_times) >= 0.7 * taken.total()
    assert all(len(set(indices(order, start, 8))) == 8 for start in range(0, 80, 8))
    for _ in range(3):  # the curriculum leaves tasks that are always solved
        order.record([played(tasks[index], [True, True]) for index in at_times])
    assert not at_times & set(indices(order, 0, 8))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_curriculum_explores_a_quarter_however_few_tasks_it_gives_at_a_time(count):
    order = build_order("curriculum", tasks_of(1000), 0)
    seen = []
    for start in range(0, 240, count):
        tasks = order.take(start, count)
        seen += [task.index for task in tasks]
        order.record([played(task, [True, False]) for task in tasks])
    # Once as many tasks as it gives have a rate, three of four are of these.
    assert len(set(seen)) == pytest.approx(60, abs=count)


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_a_curriculum_gives_no_task_twice_to_steps_that_are_played_at_once(num_ahead):
    order = build_order("curriculum", tasks_of(100), 0)
    taken = [order.take(8 * step, 8) for step in range(num_ahead + 1)]
    assert len({task.index for tasks in taken for task in tasks}) == 8 * (num_ahead + 1)
    for tasks in taken:
        order.record([played(task, [False, False]) for task in tasks])
    new = {task.index for task in order.take(8 * len(taken), 8)}
    assert not new & {task.index for tasks in taken for task in tasks}


def test_by_cost_a_curriculum_prefers_short_tasks():
    tasks = tasks_of(100)
    order = build_order("curriculum_by_cost", tasks, 0)
    for index in range(100):
        order.record([played(tasks[index], [True, False], num_tokens=10 if index < 50 else 90)])
    taken = Counter(index for start in range(0, 200, 8) for index in indices(order, start, 8)[:6])
    assert sum(taken[index] for index in range(50)) > 0.75 * taken.total()
    restored = build_order("curriculum_by_cost", tasks, 0)
    restored.restore(json.loads(json.dumps(order.state())))
    assert indices(restored, 200, 30) == indices(order, 200, 30)
    assert "num_tokens" not in build_order("curriculum", tasks, 0).state()


@pytest.mark.parametrize("name", ["curriculum", "curriculum_by_cost"])
def test_a_curriculum_expects_of_new_tasks_what_their_labels_promise(tmp_path, name):
    """Of 60 tasks one of each tier was played: only those of tier 1 were solved at times."""
    rows = [{"q": number, "tier": number % 3} for number in range(60)]
    block = file_block(write(tmp_path / "a.jsonl", *rows), labels=["tier"])
    tasks = read_known_sets(configured(block, RANGE.model_dump()).env.tasks)["train"]
    order = build_order(name, tasks, 0)
    for index, successes in ((0, [False, False]), (1, [True, False]), (2, [True, True])):
        order.record([played(tasks[index], successes)])
    taken = [index % 3 for start in range(0, 80, 8) for index in indices(order, start, 8)[:6]]
    assert taken == [1] * 60
    restored = build_order(name, tasks, 0)
    restored.restore(json.loads(json.dumps(order.state())))
    assert indices(restored, 80, 16) == indices(order, 80, 16)


@pytest.mark.parametrize("name", ["curriculum", "curriculum_by_cost"])
def test_a_curriculum_is_the_same_for_the_same_history(name):
    tasks = tasks_of(20)

    def run(num_steps, history=()):
        order = build_order(name, tasks, 3)
        for groups in history:
            order.record(groups)
        history = list(history)
        for step in range(len(history), num_steps):
            groups = [
                played(task, [(task.index + step + member) % 3 == 0 for member in range(4)])
                for task in order.take(4 * step, 4)
            ]
            order.record(groups)
            history.append(groups)
        return history

    whole = run(12)
    again = run(12, whole[:5])  # as a resumed run restores its history
    assert [[g.task.index for g in step] for step in again] == [
        [g.task.index for g in step] for step in whole
    ]


def test_a_group_that_failed_says_nothing():
    order = build_order("curriculum", tasks_of(3), 0)
    order.record([played(order.take(0, 1)[0], [None, None])])
    assert len(set(indices(order, 0, 3))) == 3


class EveryOther:
    """An order as a plugin could define it: tasks 0, 2, 4, ..., from a first one on."""

    def __init__(self, tasks, seed, *, first=0):
        self.tasks, self.seed, self.first = tasks, seed, first

    def take(self, start, count):
        numbers = (self.first + 2 * number for number in range(start, start + count))
        return [self.tasks[number % len(self.tasks)] for number in numbers]

    def record(self, groups):
        """The order does not depend on results."""

    def state(self):
        return {"seed": self.seed}

    def restore(self, state):
        """The order has no state."""


class SpoiltOrder(EveryOther):
    """An order that changes the tasks of its set, and then does what it must not do."""

    def take(self, start, count):
        self.tasks[0].reset["deep"].append(1)
        match self.first:
            case 0:
                raise asyncio.CancelledError
            case 1:
                return super().take(start, count - 1)
            case 2:
                return [None] * count

    def state(self):
        return {"when": object()} if self.first else {"rates": [{7: 0.5}]}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_fault_of_an_order_of_ones_own_is_named_and_changes_no_task(first):
    own = PythonOrderConfig(
        type="python", target=f"{__name__}:SpoiltOrder", options={"first": first}
    )
    listed = run_config().env.tasks.train.model_copy(update={"reset": {"deep": [0]}})
    tasks = RangeTasks("train", listed)
    order = build_order(own, tasks, 7)
    with pytest.raises(ConfigError, match=r"env\.tasks\.order\.target='.*:SpoiltOrder'.*"):
        order.take(0, 2)
    with pytest.raises(ConfigError, match=r"state returned .* a dict that JSON can hold"):
        order.state()
    assert tasks[0].reset["deep"] == [0]


def test_an_order_of_ones_own_is_given_the_tasks_and_the_seed():
    name = f"{__name__}:EveryOther"
    own = PythonOrderConfig(type="python", target=name, options={"first": 1})
    order = build_order(own, tasks_of(6), 7)
    assert indices(order, 0, 4) == [1, 3, 5, 1]
    assert order.state() == {"seed": 7}


def test_an_order_is_a_name_or_a_target():
    own = "{type: python, target: 'mine:Order', options: {}}"
    order = compose(["conf=echo", f"env.tasks.order={own}"]).config.env.tasks.order
    assert order == PythonOrderConfig(type="python", target="mine:Order", options={})
    with pytest.raises(
        ConfigError, match="one of shuffle, seed, curriculum, curriculum_by_cost or a block with"
    ):
        compose(["conf=echo", "env.tasks.order=backwards"])


def test_ranges_whose_tasks_differ_only_in_their_seeds_are_warned_of():
    """echo's tasks are made from the index and the name of the split, and from no seed."""
    apart = compose(["conf=echo"]).config.env.tasks
    alike = compose(
        ["conf=echo", "~env.tasks.train.reset.split", "~env.tasks.eval.reset.split"]
    ).config.env.tasks
    assert split_warnings(apart, Splits(**read_known_sets(apart))) == []
    (warning,) = split_warnings(alike, Splits(**read_known_sets(alike)))
    assert "both reset with index=i and differ only in their seeds" in warning
