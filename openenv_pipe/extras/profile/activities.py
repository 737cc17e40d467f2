"""Activities: what a thread or a waiting coroutine does for a training step, by its stack.

A stack has the label of the first rule that one of its frames meets, from the outermost frame on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import openenv_pipe
from openenv_pipe.registry import block_types

PACKAGE = f"{Path(openenv_pipe.__file__).parent}/"

SAMPLING, ENVIRONMENT, REWARDS = "sampling", "environment", "rewards"
UPDATE, PUBLISHING, CHECKPOINT = "update", "publishing", "checkpoint"
FILES, PYTHON = "files", "python"
MEANINGS = {
    SAMPLING: "the engine computes tokens, or a server of it is waited for",
    ENVIRONMENT: "an episode waits for its environment's server",
    REWARDS: "rewards are computed, or a judge or verifier is waited for",
    UPDATE: "the learner computes gradients and the optimizer's step",
    PUBLISHING: "new weights are given to the engine",
    CHECKPOINT: "a checkpoint is saved",
    FILES: "episodes and metrics are written",
    PYTHON: "other Python code: adapters, templates, advantages, the event loop",
}


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Gives `label` to frames of the files below `path` whose function begins with `function`."""

    label: str
    path: str  # in the package
    function: str = ""

    def fits(self, path: str, function: str) -> bool:
        return path.startswith(self.path) and function.startswith(self.function)


def _reward_rules() -> list[FrameRule]:
    """Return rules for the folders that have terms of rewards, those of extras included."""
    modules = (each.build.partition(":")[0] for each in block_types("reward.terms").values())
    folders = {module.rpartition(".")[0].partition(".")[2] for module in modules}
    return [FrameRule(REWARDS, f"{folder.replace('.', '/')}/") for folder in sorted(folders)]


# Of threads: what they compute. A thread that waits has no label.
THREAD_RULES = (
    FrameRule(SAMPLING, "engines/episode_batch.py", "EpisodeBatch.generate"),
    FrameRule(UPDATE, "learner/learner.py", "Learner.update"),
    FrameRule(UPDATE, "learner/parallel_batches.py"),
    FrameRule(UPDATE, "", "LearnerGroup.update"),  # on several devices, of the extra that has them
    FrameRule(CHECKPOINT, "pipeline/checkpoints.py"),
    FrameRule(PUBLISHING, "models/policy.py", "Policy.follow"),
    FrameRule(PUBLISHING, "", "MemoryTransfer."),  # without files, of the extra that has it
    FrameRule(PUBLISHING, "models/weights.py"),
    *_reward_rules(),
    FrameRule(FILES, "runs/"),
    FrameRule(FILES, "pipeline/grpo_stage.py", "_run_hooks"),
)
# Of coroutines: what they wait for, beyond this process or in another of its tasks.
COROUTINE_RULES = (
    FrameRule(PUBLISHING, "pipeline/group_sources.py", "PlayedGroups.publish"),
    FrameRule(ENVIRONMENT, "environments/client/session.py"),
    *_reward_rules(),
    FrameRule(SAMPLING, "engines/vllm/"),
)
# The innermost frame of a thread that waits for work or for an event.
IDLE = (
    *(("selectors.py", "select"), ("threading.py", "wait"), ("thread.py", "_worker")),
    *(("threading.py", "_wait_for_tstate_lock"), ("queue.py", "get"), ("connection.py", "wait")),
)


def is_idle(stack: Sequence[CodeType]) -> bool:
    """Return whether a thread with this stack waits for work or for an event."""
    leaf = stack[-1]
    return any(
        leaf.co_filename.endswith(f"/{file}") and leaf.co_name == name for file, name in IDLE
    )


def find_label(stack: Iterable[CodeType], rules: Sequence[FrameRule]) -> str | None:
    """Return the label of a stack, outermost frame first; None if no rule fits."""
    for code in stack:
        if not code.co_filename.startswith(PACKAGE):
            continue
        path = code.co_filename.removeprefix(PACKAGE)
        for rule in rules:
            if rule.fits(path, code.co_qualname):
                return rule.label
    return None
