"""What a run learns of what it runs on, for run.json: sizes, and digests of what it reads.

The host's facts (code of the environment, images) come beside it. Refused here: guesses. What
cannot be known, such as a server's own tasks, is left out.
"""

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from pydantic import JsonValue

from openenv_pipe.config.schema import (
    PythonTarget,
    PythonTerm,
    RunConfig,
    TaskRange,
    TaskSetConfig,
)
from openenv_pipe.config.schema.base import Block
from openenv_pipe.environments.tasks import Splits, TaskSet
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.files import digest_of_bytes, digest_of_file
from openenv_pipe.system.resources import load_callable


def find_facts(config: RunConfig, policy: Policy, splits: Splits) -> dict[str, JsonValue]:
    """Call it before the policy learns, where torch works."""
    return {
        **policy_facts(policy),
        "tasks": {
            "train": _task_facts(config.env.tasks.train, splits.train),
            "eval": _task_facts(config.env.tasks.eval, splits.eval),
        },
        "callables": _callables(config),
    }


def policy_facts(policy: Policy) -> dict[str, JsonValue]:
    """Where and what the policy is: digests of its tokenizer, and of the weights it starts from."""
    tokenizer = policy.tokenizer.backend_tokenizer.to_str() + (policy.tokenizer.chat_template or "")
    return {
        "device": str(policy.device),
        "num_threads": torch.get_num_threads(),
        "num_parameters": policy.num_parameters,
        "model_digest": _digest_of_tensors(policy.model.state_dict().items()),
        "tokenizer_digest": digest_of_bytes(tokenizer.encode()),
    }


def _digest_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def _task_facts(config: TaskSetConfig, tasks: TaskSet) -> dict[str, JsonValue]:
    """Of a range its length says all; of rows the digest of what `reset` is called with."""
    facts: dict[str, JsonValue] = {"source": tasks.source, "num_tasks": len(tasks)}
    if not isinstance(config, TaskRange):
        digest = hashlib.sha256()
        for index in range(len(tasks)):
            task = tasks[index]
            digest.update(json.dumps([task.seed, task.reset], sort_keys=True).encode() + b"\n")
        facts["digest"] = digest.hexdigest()
    return facts


def _callables(config: RunConfig) -> dict[str, JsonValue]:
    """Digests of the files that hold the user's own functions and classes, by target."""
    named = list(_targets(config))
    if config.trainer.warm_start.policy:
        named.append(config.trainer.warm_start.policy)
    found: dict[str, JsonValue] = {}
    for name in named:
        file = inspect.getsourcefile(inspect.unwrap(load_callable(name)))
        if file is not None:
            found[name] = digest_of_file(Path(file))
    return found


def _targets(block: Block) -> Iterator[str]:
    """The `target` of every part of `type: python` in a block and in the blocks inside it."""
    if isinstance(block, PythonTarget | PythonTerm):
        yield block.target
    for _, value in block:
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, Block):
                yield from _targets(each)
