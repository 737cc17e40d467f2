"""Training on a scripted judge: verdicts are kept, and resumed and reproduced runs use them."""

import pytest

from openenv_pipe.runs.metrics import read_metrics
from tests.commands import Command, run, wait_until
from tests.crash_matrix import Result, finish, start, uninterrupted
from tests.judge_server import JudgeServer, echo_rules

RUN = (
    "conf=echo",
    "reward=ruler",
    "device=cpu",
    "num_threads=1",
    "eval.num_tasks=2",
    "eval.baselines=false",
    "trainer.steps=3",
    "trainer.tasks_per_step=3",
    "trainer.group_size=4",
    "trainer.checkpoint.every=1",
    "judge.max_concurrent=1",
)


@pytest.fixture(scope="module")
def server():
    with JudgeServer(echo_rules, noise=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The uninterrupted run, and the requests that it made."""
    given = (*RUN, *server.overrides)
    reference = uninterrupted(tmp_path_factory.mktemp("whole"), given, "echo")
    return reference.folder, list(server.prompts)


def test_a_run_learns_from_verdicts_and_records_them(whole):
    folder, prompts = whole
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("stage") == "grpo"]
    assert [row["judge/failed"] for row in steps] == [0, 0, 0]
    assert sum(row["judge/calls"] for row in steps) == len(prompts) == len(set(prompts)) == 9
    assert all(0 < row["reward/ruler"] < 1 and "reward/env" in row for row in steps)
    assert all(row["groups/trained"] == 3 for row in steps)


def test_killed_between_verdicts_no_verdict_is_asked_for_twice(server, whole, tmp_path):
    """A request that is in flight when the run is killed has no verdict yet: it is sent again."""
    folder, prompts = whole
    server.prompts.clear()
    command = start(tmp_path, *RUN, *server.overrides)
    for num_asked in (2, 5):
        wait_until(lambda count=num_asked: len(server.prompts) >= count, "verdicts", command)
        command.kill()
        command.wait()
        killed = tmp_path / "echo" / "0001"
        command = Command(tmp_path, "train", "--resume", str(killed))
    code, err = finish(command)
    assert code == 0, err
    assert Result.of(killed).difference(Result.of(folder)) is None
    assert set(server.prompts) == set(prompts)
    assert len(server.prompts) - len(prompts) <= 2


def test_a_reproduction_asks_nobody(server, whole, tmp_path):
    folder, _ = whole
    server.prompts.clear()
    code, out, err = run(tmp_path, "reproduce", str(folder), "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "byte for byte" in out + err
    assert server.prompts == []
