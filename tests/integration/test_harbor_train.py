"""Training on Harbor's tasks, by Harbor itself, its agent terminus-2, and a local environment.

Needs `harbor` 0.24 on PATH, or named by HARBOR_COMMAND, and tmux. It is not installed by the
project: Harbor needs Python 3.12, and an environment of its own.
"""

import os
import shutil
from pathlib import Path

import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status
from tests.crash_matrix import uninterrupted

HARBOR = os.environ.get("HARBOR_COMMAND") or shutil.which("harbor")
pytestmark = pytest.mark.skipif(
    not (HARBOR and shutil.which("tmux")),
    reason="needs tmux and harbor (uv tool install harbor==0.24.0)",
)

# The reward is three digits of a checksum of the replies, so that those of a group differ.
VERIFIER = """#!/bin/bash
cd "$(dirname "$0")"/..
digits=$(grep '"message":' logs/agent/trajectory.json | cksum | cut -c 1-3)
echo "{\\"reward\\": 0.$digits, \\"tests\\": 1}" > logs/verifier/reward.json
"""
SILENT = "#!/bin/bash\nexit 1\n"


def write_task(folder: Path, verifier: str) -> None:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text(verifier)
    (folder / "instruction.md").write_text("Write a file hello.txt.\n")
    (folder / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n')


def test_two_steps_are_trained_on_the_calls_of_terminus_2_and_the_verifiers_reward(tmp_path):
    write_task(tmp_path / "tasks" / "train" / "one", VERIFIER)
    write_task(tmp_path / "tasks" / "train" / "two", SILENT)
    write_task(tmp_path / "tasks" / "eval" / "three", VERIFIER)
    command = [
        *(HARBOR, "run", "--yes", "--quiet", "--path", "{start_folder}/{prompt}"),
        *("--agent", "terminus-2", "--model", "openai/{model}", "--jobs-dir", "{results}"),
        *("--agent-kwarg", "api_base={base_url}", "--agent-kwarg", "max_turns=2"),
        *("--agent-kwarg", "record_terminal_session=false"),
        *("--env", "harbor_local:LocalEnvironment"),
    ]
    tests = Path(__file__).parents[1]
    result = uninterrupted(
        tmp_path,
        (
            *("conf=harbor", "model=tiny", "model.max_length=8192"),
            *(
                "agent.max_calls=3",
                "device=cpu",
                "num_threads=1",
                "env.max_reply_tokens=32",
                "trainer=grpo",
            ),
            *("trainer.steps=2", "trainer.tasks_per_step=2", "trainer.group_size=2"),
            *("trainer.checkpoint.every=2", "eval.num_tasks=1", "eval.samples_per_task=1"),
            f"env.tasks.train.path={tmp_path}/tasks/train",
            f"env.tasks.eval.path={tmp_path}/tasks/eval",
            "agent.command=[" + ",".join(f"'{part}'" for part in command) + "]",
            f"+agent.variables.PYTHONPATH='{tests}'",
        ),
        "harbor",
    )
    records = [each for each in read_metrics(result.folder / "metrics.jsonl") if each["step"]]
    assert [record["mismatch/max"] < 1e-4 for record in records] == [True, True]
    for step in (1, 2):
        one, two = sorted(
            read_episodes(episodes_path(result.folder, step)), key=lambda group: group.task.id
        )
        assert (one.task.id, two.task.id) == ("train/one", "train/two")
        for episode in one.episodes:
            assert not episode.status.is_failure, (episode.error, episode.output)
            assert 1 <= len(episode.turns) <= 3
            (reported,) = episode.turns[-1].steps
            assert episode.reward == reported.reward > 0.0
            assert reported.observation["reported"]["metrics"]["tests"] == 1.0
        for episode in two.episodes:
            assert episode.status is Status.NO_REWARD
            assert "RewardFileNotFoundError" in episode.error
    assert not list((result.folder / "logs" / "latest" / "programs").iterdir())
