"""Made-up configurations, episodes and run folders for the tests of `runs/`."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.eval_report import EvalReport, summarise
from openenv_pipe.runs.evals import Evaluation, save_evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.runs.record import Lineage, Purpose
from openenv_pipe.types import Episode, Finish, Group, Status, Step, Task, Turn


@cache
def _smoke() -> RunConfig:
    return compose(["conf=smoke"]).config


def config(runs_dir: Path) -> RunConfig:
    """The smoke experiment with its runs in `runs_dir`."""
    return _smoke().model_copy(update={"runs_dir": str(runs_dir)})


def create(
    runs_dir: Path,
    changed: RunConfig | None = None,
    purpose: Purpose = "training",
    lineage: Lineage | None = None,
) -> RunFolder:
    """Create a run folder. changed: the configuration; None: that of `config`."""
    return RunFolder.create(
        changed or config(runs_dir),
        overrides=["conf=smoke"],
        command=["openenv-pipe"],
        purpose=purpose,
        lineage=lineage,
    )


def turn(random: Random, num_tokens: int = 6) -> Turn:
    ids = [random.randrange(256) for _ in range(2 * num_tokens)]
    return Turn(
        prompt_ids=ids[:num_tokens],
        completion_ids=ids[num_tokens:],
        logprobs=[-random.expovariate(1.0) for _ in range(num_tokens)],
        finish=random.choice([Finish.STOP, Finish.LENGTH]),
        policy_versions=[random.randrange(5)],
        reply="crane\nor “slate” \u2028",
        messages=[{"role": "user", "content": "..g.y"}],
        steps=[
            Step(
                action={"guess": "crane"},
                observation={"marks": "..g.y", "left": 3},
                reward=random.random(),
            )
        ],
    )


def episode(random: Random, index: int, member: int, success: bool, num_turns: int = 3) -> Episode:
    return Episode(
        task=Task(id=f"eval/{index}", split="eval", index=index, seed=1000 + index),
        member=member,
        seed=17 * index + member,
        first_observation={"prompt": "Wordle"},
        turns=[turn(random) for _ in range(num_turns)],
        status=Status.DONE,
        reward=float(success) + 0.1 * random.random(),
        turn_rewards=[0.1] * num_turns,
        reward_terms={"win": float(success), "consistent": 1 / 3, "respected": 0.5, "vowels": 2.0},
        success=success,
        duration_s=random.random(),
    )


def eval_episodes(num_tasks: int = 4, samples: int = 2, success: bool = True) -> list[Episode]:
    """Return episodes of an evaluation, all of them with this success, in no order of tasks."""
    random = Random(0)
    return [
        episode(random, index, member, success)
        for member in range(samples)
        for index in reversed(range(num_tasks))
    ]


def groups(num_groups: int = 2, size: int = 3, seed: int = 0, num_turns: int = 3) -> list[Group]:
    random = Random(seed)
    made = []
    for index in range(num_groups):
        members = [episode(random, index, m, random.random() < 0.5, num_turns) for m in range(size)]
        made.append(Group(id=f"1/{index}", task=members[0].task, episodes=members))
    return made


def record(step: int) -> dict:
    share = 1 - math.exp(-step / 40)
    return {
        "stage": "grpo",
        "step": step,
        "reward/mean": share,
        "success/rate": share,
        "loss/entropy": 1 - share,
        "mismatch/mean": 1e-4,
        "mismatch/max": 1e-3,
        "tokens/trained": 100,
        "time/step_s": 2.0,
        "time/rollout_s": 1.5,
        "time/learner_s": 0.5,
        "time/tokens_per_s": 5210.4,
    }


def append(folder: RunFolder, *records: Mapping[str, Any]) -> None:
    """Write lines of metrics."""
    with closing(MetricsFile(folder.metrics_path)) as metrics:
        for each in records:
            metrics.append(each)


def train(folder: RunFolder, num_steps: int = 2) -> None:
    """Write what a run without a warm start leaves behind after some steps."""
    for step in range(1, num_steps + 1):
        append(folder, record(step))
        write_episodes(episodes_path(folder.path, step), groups(seed=step))


def evaluation(
    folder: RunFolder, label: str, episodes: Sequence[Episode], step: int | None = 0
) -> Evaluation:
    """Return the evaluation of these episodes, one group each."""
    report = summarise(
        label,
        episodes,
        folder.written_config.eval,
        0,
        reward=folder.written_config.reward,
        model="tiny",
        step=step,
        temperature=1.0,
    )
    played = [
        Group(id=f"eval/{number}", task=each.task, episodes=[each])
        for number, each in enumerate(episodes)
    ]
    return Evaluation(report=report, groups=played)


def save(
    folder: RunFolder, label: str, episodes: Sequence[Episode], step: int | None = 0
) -> tuple[Path, EvalReport]:
    """Save the evaluation of these episodes; return its path and its report."""
    made = evaluation(folder, label, episodes, step)
    return save_evaluation(folder.path, made), made.report


def evaluate(
    folder: RunFolder,
    label: str,
    success_rate: float,
    step: int | None = 0,
    *,
    num_failed: int = 0,
) -> None:
    """Save a report over ten tasks, of which a share succeeds, and the last ones fail."""
    random = Random(0)
    played = [episode(random, i, 0, success=i < 10 * success_rate) for i in range(10)]
    for each in played[len(played) - num_failed :]:
        each.status, each.error = Status.ERROR, "it is gone"
    save(folder, label, played, step)


def sweep(runs_dir: Path, successes: Mapping[float, float], stamp: str = "2026") -> None:
    """Write a sweep over the learning rate with one lost job, and its runs.

    successes: the success after training, by learning rate.
    """
    jobs: list[dict] = []
    for rate, success in successes.items():
        made = config(runs_dir)
        optimizer = made.trainer.optimizer.model_copy(update={"lr": rate})
        trainer = made.trainer.model_copy(update={"optimizer": optimizer})
        made = made.model_copy(update={"trainer": trainer})
        folder = RunFolder.create(made, overrides=[], command=[], sweep=stamp)
        train(folder)
        evaluate(folder, "start", 0.2)
        evaluate(folder, "trained", success, step=2)
        folder.finish("finished")
        job = {"overrides": [f"a={len(jobs) + 1}"], "run": folder.record.id}
        jobs.append({"index": len(jobs) + 1, "status": "finished", **job})
    lost = {"overrides": [f"a={len(jobs) + 1}"], "cause": "no", "run": None}
    jobs.append({"index": len(jobs) + 1, "status": "failed", **lost})
    path = runs_dir / "sweeps" / stamp
    path.mkdir(parents=True)
    content = {"status": "finished", "overrides": ["a=1,2"], "jobs": jobs}
    (path / "sweep.json").write_text(json.dumps(content))
