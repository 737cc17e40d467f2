"""`train` with engine=vllm on servers that the run starts: how they start, die and end."""

import contextlib
import signal
import time

import psutil
import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.types import Status
from tests.vllm_runs import (
    AS_PROGRAM,
    BOUND,
    LIMIT_S,
    PLANNING_PROGRAM,
    assert_trained_and_agreed,
    child_processes,
    ended,
    server_processes,
    start,
    steps_of,
    wait_until,
)
from tests.vllm_server import LORA_RANK, installed_vllm

pytestmark = pytest.mark.vllm


def title(process: psutil.Process) -> str:
    """Return the title that the process gave itself, or an empty text after its end."""
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0]
    return ""


@pytest.fixture
def installed() -> None:
    if isinstance(found := installed_vllm(), str):
        pytest.skip(found)


def test_a_server_killed_in_a_step_is_replaced(installed, tmp_path):
    """Trap 28: a server with all weights is killed in the second of three steps.

    The new server gets the policy of the first step and the lost requests.
    """
    process = start(tmp_path, "trainer.group_size=16", "host.sessions_per_server=32")
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        time.sleep(0.1)
        (worker,) = (
            each
            for each in server_processes(psutil.Process(process.pid))
            if title(each).startswith("VLLM::Worker")
        )
        worker.kill()
    finally:
        code, told = ended(process, tmp_path)
    assert code == 0, told
    assert_trained_and_agreed(tmp_path)
    assert [record["engine/restarts"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert "restart 1 of 2" in told
    assert "waiting for http" in told and "ready at http" in told


def test_a_server_killed_while_programs_play_is_replaced(installed, tmp_path):
    """Their calls wait for the new server, and what is trained is what it sampled."""
    (tmp_path / "agent.py").write_text(PLANNING_PROGRAM)
    process = start(tmp_path, *AS_PROGRAM)
    try:
        run = psutil.Process(process.pid)
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        wait_until(lambda: child_processes(run, "agent.py"), "a program", tmp_path)
        servers = server_processes(run)
        (worker,) = (each for each in servers if title(each).startswith("VLLM::Worker"))
        worker.kill()
        wait_until(lambda: len(steps_of(tmp_path)) >= 2, "the second step", tmp_path)
        servers += server_processes(run)
    finally:
        code, told = ended(process, tmp_path)
    assert code == 0, told
    assert_trained_and_agreed(tmp_path)
    assert [record["engine/restarts"] for record in steps_of(tmp_path)] == [0, 1, 1]
    folder = tmp_path / "runs" / "smoke" / "0001"
    groups = [group for step in (1, 2, 3) for group in read_episodes(episodes_path(folder, step))]
    assert {each.status for group in groups for each in group.episodes} == {Status.ANSWERED}
    assert not list((folder / "logs" / "latest" / "programs").iterdir())
    _, alive = psutil.wait_procs(servers, timeout=LIMIT_S)
    assert alive == []


def test_a_killed_trainer_leaves_none_of_its_two_servers(installed, tmp_path):
    """Both servers have played by then, and have received the policy of the first step."""
    more = ("engine.num_servers=2", "trainer.steps=1000")
    process = start(tmp_path, f"model.lora.rank={LORA_RANK}", *more)
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        record = steps_of(tmp_path)[0]
        assert record["logprob_check/difference"] < BOUND < record["logprob_check/moved"]
        each = [record[f"engine/{number}/generated_tokens"] for number in (0, 1)]
        assert min(each) > 0 and sum(each) == record["engine/generated_tokens"]
        servers = server_processes(psutil.Process(process.pid))
        assert len(servers) >= 6  # two servers, each with an engine and a worker process
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        _, alive = psutil.wait_procs(servers, timeout=5)
        assert alive == []
    finally:
        process.kill()
