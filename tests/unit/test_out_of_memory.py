"""Running out of memory ends with advice for its stage, wherever it happens."""

import errno
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import CPU, local_engine, random_samples, run_config, tiny_model, tiny_policy

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import TokenRequest
from openenv_pipe.errors import EngineError, HostError, OutOfMemoryError
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models import load
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.system.out_of_memory import STAGES, as_out_of_memory
from openenv_pipe.system.tasks import in_thread

ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def caught(function, *arguments, **options):
    with pytest.raises(Exception) as found:
        function(*arguments, **options)
    return found.value


@pytest.mark.parametrize(
    "error",
    [
        ON_GPU,
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_all_ways_to_say_so_are_recognised(error):
    found = as_out_of_memory(error)
    assert isinstance(found, OutOfMemoryError)
    assert "out of memory in the run: " in str(found)


def test_real_allocations_that_fail_are_recognised():
    for allocate in (
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.empty(1 << 60, dtype=np.uint8),
        lambda: bytearray(1 << 60),
    ):
        assert as_out_of_memory(caught(allocate)) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        HostError("the container was killed, out of memory: host.mem_limit_mb=64"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("the reward says: out of memory"),
    ],
)
def test_other_errors_are_not(error):
    assert as_out_of_memory(error) is None


def test_the_cause_of_another_error_is_recognised():
    error = EngineError("the weights cannot be sent to http://server")
    error.__cause__ = ON_GPU
    assert "CUDA out of memory" in str(as_out_of_memory(error))


def raise_error(error):
    raise error


def out_of_memory(*arguments, **options):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 GB")


def test_the_advice_is_for_the_stage(monkeypatch, tmp_path):
    policy = tiny_policy()
    publication = PolicyWeights(policy)
    monkeypatch.setattr(load, "build_tiny", out_of_memory)
    loading = caught(load.load_policy, tiny_model(), seed=0, device=CPU)
    assert "loading the model" in str(as_out_of_memory(loading))
    monkeypatch.setattr(publication, "_plain_weights", out_of_memory)
    publishing = caught(publication.write_weights, tmp_path)
    assert "publishing the weights" in str(as_out_of_memory(publishing))
    monkeypatch.setattr(policy, "model_logits", out_of_memory)
    assert "checking the forward pass" in str(as_out_of_memory(caught(check_forward, policy)))
    monkeypatch.setattr(policy, "predicted_logprobs", out_of_memory)
    learner = Devices(run_config(), CPU).learner(policy)
    update = caught(learner.update, random_samples(0), 1)
    assert "an update: " in str(as_out_of_memory(update))


async def test_a_sampler_that_has_no_memory_says_what_to_do(monkeypatch):
    forward = SimpleNamespace(reserve_rows=lambda num_rows: None, feed=out_of_memory)
    monkeypatch.setattr(Policy, "row_forwards", lambda policy, num: [forward] * num)
    engine = local_engine(tiny_policy())
    engine.begin_rollouts(1, 1)
    with pytest.raises(OutOfMemoryError, match=r"out of memory in sampling: .*engine\.max_batch"):
        await engine.generate(
            TokenRequest(
                episode=0, turn=0, prompt_ids=[1, 2], max_tokens=4, temperature=1.0, seed=0
            )
        )


async def test_work_in_torchs_thread_that_has_no_memory_says_what_to_do(monkeypatch, tmp_path):
    """A publication, here: whoever asked for it gets the advice, not only the end of a run."""
    publication = PolicyWeights(tiny_policy())
    monkeypatch.setattr(publication, "_plain_weights", out_of_memory)
    with ThreadPoolExecutor(1) as executor:
        publishing = in_thread(executor, publication.write_weights, tmp_path)
        with pytest.raises(OutOfMemoryError, match=r"publishing the weights: .*engine\.publish"):
            await publishing
        with pytest.raises(ZeroDivisionError):
            await in_thread(executor, lambda: 1 // 0)
        known = OutOfMemoryError("with advice already")
        with pytest.raises(OutOfMemoryError) as found:
            await in_thread(executor, raise_error, known)
        assert found.value is known and known.__cause__ is None


@pytest.mark.parametrize("advice", sorted({advice for _, advice in STAGES.values()}))
def test_the_advice_names_keys_that_exist(advice):
    keys = re.findall(r"\b(?:engine|env|model|trainer)(?:\.[a-z_]+)+", advice)
    whole = compose(["conf=echo"]).config.model_dump()
    vllm = compose(["conf=echo", "engine=vllm"]).config.model_dump()
    for key in keys:
        for config in (whole, vllm):
            value = config
            for part in key.split("."):
                value = value.get(part, KeyError) if isinstance(value, dict) else KeyError
            if value is not KeyError:
                break
        else:
            pytest.fail(f"{key} is no key")
