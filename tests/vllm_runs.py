"""Starts `train` with engine=vllm for the tests, and checks the results."""

from pathlib import Path

import psutil

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import Command
from tests.programs import CLIENT
from tests.vllm_server import SMALL

LIMIT_S = 600.0  # a start takes 20 to 30 s on two idle cores, and minutes on busy ones
BOUND = 1e-4  # for a difference of logprobs, in float32
# A planner is asked before the player, who continues his own conversation.
PLANNING_PROGRAM = (
    # A call waits as long as the start of a server may take.
    CLIENT.replace("timeout=60", f"timeout={LIMIT_S:g}")
    + """
messages = task["messages"]
for _ in range(2):
    plan = ask([{"role": "system", "content": "plan"}, messages[-1]])
    reply = ask(messages)
    messages += [reply, user(plan["content"][:2])]
"""
)
# The program has to be in this file of the folder in which the run is started.
AS_PROGRAM = ("agent=program", "agent.command=['{python}','-S','agent.py']")


def start(folder: Path, *overrides: str) -> Command:
    more = ("eval.num_tasks=2", "trainer.optimizer.lr=1e-2")
    return Command(folder, "train", *SMALL, *overrides, *more)


def server_processes(run: psutil.Process) -> list[psutil.Process]:
    """Return the run's child processes whose command line names vLLM."""
    return child_processes(run, "vllm")


def child_processes(run: psutil.Process, word: str) -> list[psutil.Process]:
    """Return the run's child processes with a word in their command line, in any case."""
    found = []
    for process in run.children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if word in words.lower():
            found.append(process)
    return found


def steps_of(folder: Path) -> list[dict]:
    path = folder / "runs" / "smoke" / "0001" / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def assert_trained_and_agreed(folder: Path) -> None:
    """Assert three steps, and after each the same, changed policy in server and trainer."""
    steps = steps_of(folder)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["groups/trained"] > 0
        assert record["logprob_check/difference"] < BOUND < record["logprob_check/moved"]
        assert record["mismatch/max"] < BOUND
    run = RunFolder.open(folder / "runs" / "smoke" / "0001")
    for step in (1, 2, 3):
        groups = read_episodes(run.path / "episodes" / f"step_{step:06d}.jsonl.gz")
        turns = [turn for group in groups for e in group.episodes for turn in e.turns]
        assert {version for turn in turns for version in turn.policy_versions} == {step - 1}
