"""metrics.jsonl and the trackers that record beside it."""

import json
import math
import sys
from contextlib import closing

import numpy
import pytest

from openenv_pipe.config.schema import (
    NoTrackerConfig,
    PythonTrackerConfig,
    TensorboardTrackerConfig,
)
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.runs.metrics import MetricsFile, read_metrics, without_times
from openenv_pipe.trackers import build_tracker


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


def test_no_tracker_takes_everything(tmp_path):
    tracker = build_tracker(NoTrackerConfig(type="none"), tmp_path)
    tracker.log({"step": 1, "stage": "grpo"})
    tracker.close()
    assert not list(tmp_path.iterdir())


class CsvTracker:
    """A tracker as a plugin could define it: it writes one line per record to a file of the run
    folder."""

    def __init__(self, folder, *, key):
        self.path, self.key, self.lines = folder / "tracked.csv", key, []

    def log(self, record):
        self.lines.append(f"{record['step']},{record[self.key]}")

    def close(self):
        self.path.write_text("\n".join(self.lines))


def test_a_python_tracker_is_given_the_run_folder_and_its_options(tmp_path):
    config = PythonTrackerConfig(
        type="python", target=f"{__name__}:CsvTracker", options={"key": "reward/mean"}
    )
    tracker = build_tracker(config, tmp_path)
    tracker.log({"step": 1, "stage": "grpo", "reward/mean": 0.5})
    tracker.close()
    assert (tmp_path / "tracked.csv").read_text() == "1,0.5"


def test_a_missing_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install .*tensorboard"):
        build_tracker(TensorboardTrackerConfig(type="tensorboard"), tmp_path)
