"""`train` with engine=vllm on servers of the run's own: their life and their death."""

import contextlib
import signal
import time

import psutil
import pytest

from tests.vllm_runs import (
    BOUND,
    LIMIT_S,
    assert_trained_and_agreed,
    ended,
    server_processes,
    start,
    steps_of,
    wait_until,
)
from tests.vllm_server import LORA_RANK, installed_vllm

pytestmark = pytest.mark.vllm


def title(process: psutil.Process) -> str:
    """How it calls itself; nothing once it has ended."""
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0]
    return ""


@pytest.fixture
def installed() -> None:
    if isinstance(found := installed_vllm(), str):
        pytest.skip(found)


def test_a_server_killed_in_a_step_is_replaced(installed, tmp_path):
    """Three steps with all weights on a server of the run's own, which is killed in the second:
    the next one gets the policy of the first step, and the requests that were lost. Trap 28."""
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
    assert "loading weights" in told  # what a start is at


def test_a_killed_trainer_leaves_none_of_its_two_servers(installed, tmp_path):
    """Both have played by then, and have got the policy after the first step."""
    more = ("engine.num_servers=2", "trainer.steps=1000")
    process = start(tmp_path, f"model.lora.rank={LORA_RANK}", *more)
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        record = steps_of(tmp_path)[0]
        assert record["canary/difference"] < BOUND < record["canary/moved"]
        each = [record[f"engine/{number}/generated_tokens"] for number in (0, 1)]
        assert min(each) > 0 and sum(each) == record["engine/generated_tokens"]
        servers = server_processes(psutil.Process(process.pid))
        assert len(servers) >= 6  # two servers, their engines, their workers
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        _, alive = psutil.wait_procs(servers, timeout=5)
        assert alive == []
    finally:
        process.kill()
