"""`openenv-pipe lr` in whole searches: killed, with a warm start, and broken by a rate."""

import json
import shlex
import signal

from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import SMALL, Command, ended_by, run, servers_of
from tests.crash_matrix import Result

RATES = "1e-3,1e-2"
ECHO = (
    *(
        "conf=echo",
        "trainer.tasks_per_step=2",
        "trainer.group_size=4",
        "trainer.optimizer.type=adamw",
    ),
    *("trainer.checkpoint.every=1", *SMALL),
)


def steps_of(folder):
    """Return the stage, the step and the rate of each record of a run."""
    records = read_metrics(folder / "metrics.jsonl")
    return [(record["stage"], record["step"], record.get("lr")) for record in records]


def test_a_search_that_was_killed_goes_on_when_it_is_repeated(tmp_path):
    """The result is that of a search that nothing has ended, and a third one trains nothing."""
    command = ("lr", *ECHO, "--rates", RATES, "--steps", "2", "--format", "json")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    code, expected, err = run(whole, *command)
    assert code in (0, 1), err
    assert "2 learning rates x 2 steps of 2 x 4 episodes" in err
    assert not list(whole.glob("runs/echo_lr/*/eval/*"))
    process = Command(killed, *command)
    begun = killed / "runs/echo_lr/0002/metrics.jsonl"
    ended_by(signal.SIGKILL, process, begun.exists, "the second rate")
    assert run(killed, *command)[:2] == (code, expected)
    assert len(list(killed.glob("runs/echo_lr/[0-9]*"))) == 2
    for name in ("0001", "0002"):
        mine, theirs = (each / "runs/echo_lr" / name for each in (killed, whole))
        assert Result.of(mine).difference(Result.of(theirs)) is None
    again, out, err = run(killed, *command)
    assert (again, out) == (code, expected)
    assert err.count("has these steps already") == 2


def test_an_interrupted_search_says_how_it_goes_on(tmp_path):
    words = ("lr", *ECHO, "trainer.steps=1000", "--steps", "1000")
    process = Command(tmp_path, *words)
    code = ended_by(signal.SIGINT, process, lambda: "grpo 1/1000" in process.err, "the first step")
    assert code == 130, process.err
    assert f"to continue: openenv-pipe {shlex.join(words)}" in process.err
    assert RunFolder.open(tmp_path / "runs/echo_lr/0001").status == "interrupted"
    assert servers_of(tmp_path) == []


def test_more_steps_go_on_from_those_that_are_done_and_a_broken_rate_is_not_tried_again(tmp_path):
    """At one rate little changes, and at the other one the decay makes weights infinite."""
    decay = "trainer.optimizer.weight_decay=1e10"
    command = ("lr", *ECHO, decay, "--rates", "1e-13,1e12")
    code, out, err = run(tmp_path, *command, "--steps", "3")
    assert code == 1, err
    assert "TrainingError" in out
    assert out.splitlines()[-1].startswith("no choice: ")
    code, out, err = run(tmp_path, *command, "--steps", "4")
    assert code == 1, err
    folders = sorted(tmp_path.glob("runs/echo_lr/[0-9]*"))
    assert [RunFolder.open(each).status for each in folders] == ["finished", "failed"]
    assert [step for _, step, _ in steps_of(folders[0])] == [1, 2, 3, 4]


def test_all_rates_start_from_one_warm_start(tmp_path):
    code, out, err = run(
        tmp_path,
        *("lr", "conf=smoke", *SMALL, "--rates", RATES, "--steps", "2", "--format", "json"),
        "trainer.optimizer={type: adamw, schedule: constant, final_lr_share: null}",
    )
    assert code in (0, 1), err
    assert "all start from one warm start of 2 steps" in err
    first, second = sorted(tmp_path.glob("runs/smoke_lr/[0-9]*"))
    assert steps_of(first)[2:] == [("grpo", 1, 1e-3), ("grpo", 2, 1e-3)]
    assert steps_of(second) == [("grpo", 1, 1e-2), ("grpo", 2, 1e-2)]
    assert RunFolder.open(second).record.lineage.checkpoint == "step_000000"
    rewards = [read_metrics(each / "metrics.jsonl")[-2]["reward/mean"] for each in (first, second)]
    assert rewards[0] == rewards[1]  # of the first step, which the same weights have played
    found = json.loads(out)
    assert [each["lr"] for each in found["trials"]] == [1e-3, 1e-2]
    assert (found["override"] is None) == (code == 1)
