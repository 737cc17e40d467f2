"""metrics.jsonl."""

import json
import math
from contextlib import closing

import numpy
import pytest

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.metrics import MetricsFile, read_metrics, without_times
from openenv_pipe.system.budgets import JsonBudget


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, *records):
    with closing(MetricsFile(path)) as metrics:
        for record in records:
            metrics.append({"stage": "grpo", **record})
        return metrics


def test_step_and_stage_come_first_then_the_sorted_keys(path):
    append(path, {"reward/mean": 0.1, "clip/share": 0, "step": 1})
    assert path.read_text() == '{"step":1,"stage":"grpo","clip/share":0,"reward/mean":0.1}\n'


def test_numbers_come_back_exactly_and_what_is_not_finite_as_null(path):
    values = {"a": 0.1 + 0.2, "b": numpy.float32(0.1), "c": numpy.int64(3), "d": True}
    append(path, {"step": 1, **values, "e": math.nan, "f": -math.inf})
    (record,) = read_metrics(path)
    assert record["a"] == 0.1 + 0.2 and record["b"] == float(numpy.float32(0.1))
    assert (record["c"], record["d"], record["e"], record["f"]) == (3, 1, None, None)


def test_a_line_can_be_read_before_the_file_is_closed(path):
    with closing(MetricsFile(path)) as metrics:
        metrics.append({"step": 1, "stage": "grpo"})
        assert read_metrics(path) == [{"step": 1, "stage": "grpo"}]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_cut_off_by_a_kill_is_passed_over_then_removed(path, cut):
    append(path, {"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.5})
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_metrics(path)] == [1]
    append(path, {"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_damaged_line_is_a_user_error_with_its_number(path):
    path.write_text('{"step":1,"stage":"grpo"}\nnonsense\n')
    with pytest.raises(RunFolderError, match="line 2"):
        read_metrics(path)


def test_no_file_is_no_record(path):
    assert read_metrics(path) == []


def test_runs_that_differ_in_time_only_have_equal_lines(path):
    append(path, *({"step": 1, "loss/kl": 1e-17, "time/step_s": time_s} for time_s in (1.0, 2.0)))
    first, second = map(without_times, path.read_text().splitlines())
    assert first == second == '{"step":1,"stage":"grpo","loss/kl":1e-17}'


@pytest.mark.slow
def test_metrics_beyond_their_budget_are_named(path):
    path.write_text("".join('{"stage":"grpo","step":1,"a":1}\n' for _ in range(350_000)))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, .* has more than 1,000,000 values"):
        read_metrics(path)


def test_names_of_metrics_are_counted(path):
    lines = ({"stage": "grpo", "step": n, **{f"{n}/{i}": 1 for i in range(900)}} for n in range(20))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunFolderError, match="has more than 10,000 names of metrics"):
        read_metrics(path)


def test_a_run_reads_all_of_its_own_metrics(path):
    append(path, *({"step": step, "reward/mean": 0.5} for step in range(3)))
    small = JsonBudget(max_mb=1, max_values=5)
    with pytest.raises(RunFolderError, match="has more than 5 values"):
        read_metrics(path, small)
    assert len(read_metrics(path, budget=None)) == 3


@pytest.mark.parametrize("content", [b"x" * (2**20 + 1), b"\0" * (2**20 + 1) + b"\n"])
def test_a_line_that_is_too_long_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="has a line of more than 1 MB"):
        read_metrics(path)
