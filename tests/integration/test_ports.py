"""What another user of the machine can do at the ports of a run, and to its files in shared places:
nothing. `test_vllm_train` has a run with vLLM servers."""

import os
import signal

import pytest

from tests.commands import SMALL, Command, wait_until
from tests.other_user import assert_nothing_for_others, listening, shared_places
from tests.ports import lasting_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
WAITING = "agent.command=['{python}','-c','import time; time.sleep(3600)']"
ECHO = ("train", "conf=echo", "trainer.steps=10000", *SMALL)
PORT = lasting_port()
# The arguments of a command, and the pattern of the files that show that it is at work.
KINDS = {
    "two devices": ((*ECHO, "trainer.devices=2"), "runs/echo/*/metrics.jsonl"),
    "a program": (
        (*ECHO, "agent=program", WAITING, "agent.timeout_s=3600"),
        "runs/echo/*/logs/attempt_1/programs/*",
    ),
    "serve": (("serve", "--engine", "local", "--port", str(PORT)), ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_user_gets_nothing_of_a_run(kind, adapter_run, tmp_path):
    arguments, pattern = KINDS[kind]
    if kind == "serve":
        arguments = (arguments[0], str(adapter_run), *arguments[1:])
    with shared_places() as shared:
        run = Command(tmp_path, *arguments)

        def is_at_work():
            if not pattern:
                return PORT in listening(run.pid)
            return any(each.stat().st_size for each in tmp_path.glob(pattern))

        try:
            wait_until(is_at_work, "the first step", run)
            assert_nothing_for_others(run.pid, shared)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()
