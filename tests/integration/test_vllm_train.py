"""`train` with engine=vllm on servers that the run starts: how they start, die and end."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.types import Status
from tests.commands import Command, wait_until
from tests.families import make_family
from tests.other_user import assert_nothing_for_others, shared_places
from tests.vllm_runs import (
    AS_PROGRAM,
    BOUND,
    LIMIT_S,
    PLANNING_PROGRAM,
    assert_trained_and_agreed,
    child_processes,
    server_processes,
    start,
    steps_of,
)
from tests.vllm_server import EAGER, LORA_RANK, installed_vllm

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


def test_a_server_killed_while_programs_play_is_replaced(installed, tmp_path):
    """Trap 28. Their calls wait for the new server, and what is trained is what it sampled."""
    (tmp_path / "agent.py").write_text(PLANNING_PROGRAM)
    command = start(tmp_path, EAGER, *AS_PROGRAM)
    try:
        run = psutil.Process(command.pid)
        wait_until(lambda: steps_of(tmp_path), "the first step", command, LIMIT_S)
        wait_until(lambda: child_processes(run, "agent.py"), "a program", command, LIMIT_S)
        servers = server_processes(run)
        (worker,) = (each for each in servers if title(each).startswith("VLLM::Worker"))
        worker.kill()
        wait_until(lambda: len(steps_of(tmp_path)) >= 2, "the second step", command, LIMIT_S)
        servers += server_processes(run)
        assert command.wait(LIMIT_S) == 0, command.err
    finally:
        command.kill()
    assert_trained_and_agreed(tmp_path)
    assert [record["engine/restarts"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert "restart 1 of 2" in command.err
    assert "waiting for http" in command.err and "ready at http" in command.err
    folder = tmp_path / "runs" / "smoke" / "0001"
    groups = [group for step in (1, 2, 3) for group in read_episodes(episodes_path(folder, step))]
    assert {each.status for group in groups for each in group.episodes} == {Status.ANSWERED}
    assert not list((folder / "logs" / "latest" / "programs").iterdir())
    _, alive = psutil.wait_procs(servers, timeout=LIMIT_S)
    assert alive == []


SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Gemma3TextConfig", {"query_pre_attn_scalar": 32}),
    ],
    ids=["gpt_oss", "gemma3"],
)
def test_all_weights_of_a_family_are_renewed(installed, tmp_path, family, options):
    """vLLM's own reload leaves the experts and sinks of GPT-OSS as they were, and packs no experts
    for a CPU again."""
    folder = make_family(tmp_path / "model", family, head_dim=32, **SLIDING, **options)
    model = ("model=hub", f"model.path={folder}", "model.dtype=float32", "model.autocast=float32")
    few = ("trainer.steps=3", "trainer.tasks_per_step=2", "trainer.group_size=4")
    small = ("model.lora.rank=0", "eval.num_tasks=2", "env.max_reply_tokens=12", "device=cpu")
    run = ("conf=echo", "name=smoke", "engine=vllm", "num_threads=1", "trainer.optimizer.lr=1e-3")
    command = Command(tmp_path, "train", *run, EAGER, *model, *few, *small)
    try:
        assert command.wait(LIMIT_S) == 0, command.err
    finally:
        command.kill()
    assert_trained_and_agreed(tmp_path)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_places() as folder:
        yield folder


def test_a_killed_trainer_leaves_none_of_its_two_servers(installed, shared, tmp_path):
    """Both servers have played by then, and have received the policy of the first step.

    Another user of the machine gets nothing of them.
    """
    more = (EAGER, "engine.num_servers=2", "trainer.steps=1000")
    command = start(tmp_path, f"model.lora.rank={LORA_RANK}", *more)
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", command, LIMIT_S)
        record = steps_of(tmp_path)[0]
        assert record["logprob_check/difference"] < BOUND < record["logprob_check/moved"]
        each = [record[f"engine/{number}/generated_tokens"] for number in (0, 1)]
        assert min(each) > 0 and sum(each) == record["engine/generated_tokens"]
        servers = server_processes(psutil.Process(command.pid))
        assert len(servers) >= 6  # two servers, each with an engine and a worker process
        if os.geteuid() == 0:
            assert_nothing_for_others(command.pid, shared)
        command.kill()
        command.wait(LIMIT_S)
        _, alive = psutil.wait_procs(servers, timeout=5)
        assert alive == []
    finally:
        command.kill()
