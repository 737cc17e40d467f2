"""Collect facts about a run for run.json: sizes, and digests of the files that it reads.

Hosts, sandboxes and engines add facts of their own, such as the environment's code and images.
Facts that cannot be determined, such as a server's own tasks, are left out.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from pydantic import JsonValue

from openenv_pipe.config.schema import PythonTarget, PythonTerm, RunConfig, TaskRange, TaskSetConfig
from openenv_pipe.config.schema.base import Block
from openenv_pipe.environments.hosts.package import code_facts, package_of
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.models.hub import substitute_of
from openenv_pipe.models.policy import Policy
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.runs.trust import functions_of_variables
from openenv_pipe.system.files import digest_of_bytes, digest_of_file
from openenv_pipe.system.resources import file_in_current_folder, load_callable


def find_facts(config: RunConfig, policy: Policy, rollout: RolloutContext) -> dict[str, JsonValue]:
    """Collect the facts. Call it in torch's thread, before the policy is trained."""
    tasks: dict[str, JsonValue] = {}
    for name, each in config.environments.items():
        splits, prefix = rollout.environments[name].splits, f"{name}/" if name else ""
        tasks[f"{prefix}train"] = _task_facts(each.env.tasks.train, splits.train)
        tasks[f"{prefix}eval"] = _task_facts(each.env.tasks.eval, splits.eval)
    return {
        **policy_facts(policy),
        "weights_from": substitute_of(config.model),
        "tasks": tasks,
        "callables": _callables(config),
        "env_functions": _env_functions(config),
    }


def facts_before(config: RunConfig) -> dict[str, JsonValue]:
    """Return the facts that are known before anything starts: those about the user's code.

    Raises ConfigError if a package or a function is gone.
    """
    packages = {
        name: code_facts(package_of(each.env)) for name, each in config.environments.items()
    }
    first = packages.pop("")
    functions = {"callables": _callables(config), "env_functions": _env_functions(config)}
    return {**first, "beside": {**packages}, **functions}


def policy_facts(policy: Policy) -> dict[str, JsonValue]:
    """Return the policy's device and size, and digests of tokenizer, first weights and teachers."""
    teachers = {id(each): each for each in policy.teachers.values()}.values()
    of_teachers = chain.from_iterable(each.named_weights() for each in teachers)
    tokenizer = policy.tokenizer.backend_tokenizer.to_str() + (policy.tokenizer.chat_template or "")
    return {
        "device": str(policy.device),
        "num_threads": torch.get_num_threads(),
        "num_parameters": policy.num_parameters,
        "history": policy.chat.history,
        "forward": {
            "sampler": policy.sampler,
            "learner": "packed" if policy.packs_rows else "padded",
            "left_out": dict(policy.left_out),
        },
        "model_digest": _digest_of_tensors(policy.named_weights()),
        "tokenizer_digest": digest_of_bytes(tokenizer.encode()),
        **({"teacher_digest": _digest_of_tensors(of_teachers)} if teachers else {}),
    }


def _digest_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def _task_facts(config: TaskSetConfig, tasks: TaskSet) -> dict[str, JsonValue]:
    """Return the tasks' source and number; for rows also a digest of the arguments of `reset`."""
    facts: dict[str, JsonValue] = {"source": tasks.source, "num_tasks": len(tasks)}
    if not isinstance(config, TaskRange):
        digest = hashlib.sha256()
        for index in range(len(tasks)):
            task = tasks[index]
            digest.update(json.dumps([task.seed, task.reset], sort_keys=True).encode() + b"\n")
        facts["digest"] = digest.hexdigest()
    return facts


def _callables(config: RunConfig) -> dict[str, JsonValue]:
    """Return digests of the files that define the user's functions and classes, by target."""
    named = list(targets_of(config))
    if policy := config.trainer.warm_start.source.scripted_policy:
        named.append(policy)
    files = {name: _defining_file(name) for name in named}
    return {name: digest_of_file(Path(file)) for name, file in files.items() if file is not None}


def _env_functions(config: RunConfig) -> dict[str, JsonValue]:
    """Return digests of the files of functions that an environment's variables may name.

    Only the environment's server imports them.
    """
    blocks = config.environments.values()
    names = (name for each in blocks for name in functions_of_variables(each.env))
    files = {name: file_in_current_folder(name) for name in names}
    return {name: digest_of_file(file) for name, file in files.items() if file is not None}


def _defining_file(name: str) -> str | None:
    """Return the source file of a target; of an object with `__call__`, that of its module."""
    target = inspect.unwrap(load_callable(name))
    try:
        return inspect.getsourcefile(target)
    except TypeError:  # neither a function nor a class
        return getattr(sys.modules[name.partition(":")[0]], "__file__", None)


def targets_of(block: Block) -> Iterator[str]:
    """Yield the `target` of every `type: python` block, including nested blocks."""
    if isinstance(block, PythonTarget | PythonTerm):
        yield block.target
    for _, value in block:
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, Block):
                yield from targets_of(each)
