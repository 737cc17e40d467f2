"""Training on a scripted judge and a verifier.

Their answers are kept, and resumed and reproduced runs use them.
"""

import json

import pytest

from openenv_pipe.runs.metrics import read_metrics
from tests.commands import Command, run, wait_until
from tests.crash_matrix import Result, finish, start, uninterrupted
from tests.judge_server import JudgeServer, echo_rules
from tests.verifier_server import VerifierServer

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
def verifier():
    with VerifierServer() as server:
        yield server


@pytest.fixture(scope="module")
def given(server, verifier):
    """The command line of the run."""
    source = f"{{type: http, url: '{verifier.url}', headers: {{}}, max_retries: 1}}"
    term = f"type: verifier, weight: 0.1, per_turn: false, source: {source}, weights: null"
    limits = "gates: [], timeout_s: 60, max_concurrent: 1, max_failed_share: 0.0"
    return (*RUN, *server.overrides, f"+reward.terms.checked={{{term}, {limits}}}")


@pytest.fixture(scope="module")
def whole(server, verifier, given, tmp_path_factory):
    """The uninterrupted run, and the requests that it made."""
    reference = uninterrupted(tmp_path_factory.mktemp("whole"), given, "echo")
    return reference.folder, list(server.prompts), list(verifier.bodies)


def test_a_run_learns_from_verdicts_and_records_them(whole):
    folder, prompts, bodies = whole
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("stage") == "grpo"]
    assert [row["judge/failed"] for row in steps] == [0, 0, 0]
    assert sum(row["judge/calls"] for row in steps) == len(prompts) == len(set(prompts)) == 9
    assert all(0 < row["reward/ruler"] < 1 and "reward/env" in row for row in steps)
    assert all(row["groups/trained"] == 3 for row in steps)
    assert len(bodies) == len(unique(bodies)) > 9  # episodes of training, and two evaluated twice
    assert all("reward/checked" in row for row in steps)


def unique(bodies):
    return {json.dumps(each, sort_keys=True) for each in bodies}


def test_killed_between_verdicts_no_verdict_is_asked_for_twice(
    server, verifier, given, whole, tmp_path
):
    """No answer that a killed run has stored is asked for again.

    A request without a stored answer, because the judge or the disk was at work when the run was
    killed, is sent again.
    """
    folder, prompts, bodies = whole
    server.prompts.clear()
    verifier.bodies.clear()
    killed = tmp_path / "echo" / "0001"
    kills = []
    command = start(tmp_path, *given)
    for num_asked in (2, 5):
        wait_until(lambda count=num_asked: len(server.prompts) >= count, "verdicts", command)
        command.kill()
        command.wait()
        kills.append((len(server.prompts), len(verifier.bodies), stored_answers(killed)))
        command = Command(tmp_path, "train", "--resume", str(killed))
    code, err = finish(command)
    assert code == 0, err
    assert Result.of(killed).difference(Result.of(folder)) is None
    assert set(server.prompts) == set(prompts)
    assert unique(verifier.bodies) == unique(bodies)
    for num_prompts, num_bodies, before in kills:
        asked = len(set(server.prompts[num_prompts:])) + len(unique(verifier.bodies[num_bodies:]))
        assert asked == len(stored_answers(killed) - before)


def stored_answers(folder):
    """The names of the stored answers of a run's judge and verifier, one for each request."""
    return {path.name for path in (folder / "judge").rglob("*.json")}


def test_a_reproduction_asks_nobody(server, verifier, whole, tmp_path):
    folder, _, _ = whole
    server.prompts.clear()
    verifier.bodies.clear()
    code, out, err = run(tmp_path, "reproduce", str(folder), "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "byte for byte" in out + err
    assert server.prompts == []
    assert verifier.bodies == []
