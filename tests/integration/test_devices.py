"""The learner on two devices, here two CPU processes, against the learner on one.

Each has the whole policy (trainer.parallel=data); `test_sharding.py` is about shards.

Losses agree to 1e-5 and gradients to 1e-4, both relative. `gloo` replaces a GPU's `nccl`.
"""

import threading

import psutil
import pytest
import torch
from fakes import (
    CPU,
    GRADIENT_BOUND,
    LOSS_BOUND,
    PLAIN,
    WITH_ALL,
    alike_samples,
    random_samples,
    run_config,
    tiny_model,
)

from openenv_pipe.errors import ConfigError, RankLostError, TrainingError
from openenv_pipe.learner.checkpoint import load_progress, save_progress
from openenv_pipe.learner.distributed import workers as workers_module
from openenv_pipe.learner.distributed.build import build_learner
from openenv_pipe.learner.distributed.workers import Workers, reject_missing_devices
from openenv_pipe.models.load import load_policy
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.process import ManagedProcess
from tests.commands import SMALL, Command, wait_until


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    workers = Workers(2, CPU, tmp_path_factory.mktemp("logs"), num_threads=2)
    yield workers
    workers.close()


def config_of(changes, *, lora_rank):
    values = {f"trainer.{key}": value for key, value in changes.items()}
    return run_config({**values, "model": tiny_model(lora_rank=lora_rank).model_dump()})


def learner_of(config, workers):
    """Return the policy and its learner; an adapter gets weights that are not zero."""
    policy = load_policy(config.model, seed=config.seed, device=CPU)
    draw = torch.Generator().manual_seed(1)
    for name, values in policy.trained_parameters():
        if "lora_B" in name:
            values.data = torch.randn(values.shape, generator=draw) * 0.05
    return policy, build_learner(policy, config, workers)


def trained(policy):
    return {name: values.detach().clone() for name, values in policy.trained_parameters()}


def numbers_of(metrics):
    return {
        key: value
        for key, value in metrics.items()
        if not key.startswith("time/") and key != "stage"
    }


def assert_close(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for key, one in theirs.items():
        difference = (ours[key] - one).abs().max()
        assert difference <= bound * one.abs().max() + 1e-8, (key, difference.item())


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_two_give_the_losses_and_gradients_of_one(workers, lora_rank):
    """The gradients are compared by Adam's first moment: a tenth of the gradient after one
    unclipped step."""
    config = config_of(PLAIN, lora_rank=lora_rank)
    samples = random_samples(3, count=7)
    seen = []
    for some in (None, workers):
        policy, learner = learner_of(config, some)
        metrics = learner.update(samples, 1)
        tokens = [(*each.entropy, *each.mismatch) for each in learner.trained_tokens]
        seen.append((metrics, learner.optimizer.tensors(), trained(policy), tokens))
    (one, one_state, one_weights, one_tokens), (two, two_state, two_weights, two_tokens) = seen
    for ours, theirs in zip(two_tokens, one_tokens, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-3), "also those of the other rank"
    assert two["tokens/trained"] == one["tokens/trained"]
    assert numbers_of(two) == pytest.approx(numbers_of(one), rel=LOSS_BOUND, abs=LOSS_BOUND)
    gradients = [
        {key: value for key, value in state.items() if key.endswith("exp_avg")}
        for state in (two_state, one_state)
    ]
    assert_close(*gradients, GRADIENT_BOUND)
    assert any(value.any() for value in gradients[0].values())
    assert two_weights.keys() == one_weights.keys()


def test_all_that_an_update_may_consist_of(workers):
    """Shared prefixes, a reference, corrections to the step's start and a bounded norm work
    together."""
    config = config_of(WITH_ALL, lora_rank=0)
    seen = []
    for some in (None, workers):
        policy, learner = learner_of(config, some)
        metrics = [learner.update(alike_samples(step, count=5), step) for step in (1, 2, 3)]
        seen.append((metrics, trained(policy)))
    (ones, one_weights), (twos, two_weights) = seen
    for one, two in zip(ones, twos, strict=True):
        assert one["loss/kl"] != 0.0 or one is ones[0]
        # a group that is split over two ranks shares fewer prefixes
        del one["tokens/computed"], two["tokens/computed"]
        assert numbers_of(two) == pytest.approx(
            numbers_of(one), rel=10 * LOSS_BOUND, abs=LOSS_BOUND
        )
    assert_close(two_weights, one_weights, GRADIENT_BOUND)


def test_fewer_samples_than_devices(workers):
    """No rank waits forever, and the padding rows of an idle rank change no number."""
    config = config_of(PLAIN, lora_rank=0)
    for samples in (random_samples(1, count=1), random_samples(2, count=3)):
        one, two = (learner_of(config, some)[1].update(samples, 1) for some in (None, workers))
        assert numbers_of(two) == pytest.approx(numbers_of(one), rel=LOSS_BOUND, abs=LOSS_BOUND)


def test_a_checkpoint_is_gone_on_from_to_the_bit(workers, tmp_path):
    config = config_of(WITH_ALL, lora_rank=0)
    policy, learner = learner_of(config, workers)
    learner.update(random_samples(1), 1)
    save_progress(tmp_path, policy, learner.optimizer)
    saved = trained(policy)
    expected = learner.update(random_samples(2), 2), trained(policy), learner.optimizer.tensors()

    policy, learner = learner_of(config, workers)
    policy.follow(_holding(policy, saved))
    load_progress(tmp_path, policy, learner.optimizer)
    again = learner.update(random_samples(2), 2), trained(policy), learner.optimizer.tensors()
    assert numbers_of(again[0]) == numbers_of(expected[0])
    for ours, theirs in zip(again[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _holding(policy, weights):
    twin = policy.twin()
    for name, values in twin.trained_parameters():
        values.data = weights[name]
    return twin


def test_a_rank_whose_end_nobody_inside_a_kernel_sees_ends_the_run(workers, monkeypatch):
    """The rank is suspended, so its connections stay open, as they would between GPUs."""
    _, learner = learner_of(config_of(PLAIN, lora_rank=0), workers)
    learner.update(random_samples(1), 1)
    (process,) = psutil.Process(workers._processes[0].pid).children()
    said = []

    def end_at_once(error):
        said.append(str(error))
        process.resume()

    monkeypatch.setattr(workers, "_device", torch.device("cuda"))
    monkeypatch.setattr(workers_module, "EXIT_GRACE_S", 0.2)
    monkeypatch.setattr(workers_module, "end_at_once", end_at_once)
    monkeypatch.setattr(ManagedProcess, "returncode", 137)
    process.suspend()
    at_last = threading.Timer(30.0, process.resume)
    at_last.start()
    learner.update(random_samples(2), 2)
    at_last.cancel()
    assert said[0].startswith("rank 1 of trainer.devices=2 ended with exit code 137")


def test_the_end_of_a_rank_ends_the_update_with_its_log(workers):
    """The rank is suspended before its death, so that rank 0 is waiting for it.

    This is the last test of these workers.
    """
    _, learner = learner_of(config_of(PLAIN, lora_rank=0), workers)
    learner.update(random_samples(1), 1)
    (process,) = psutil.Process(workers._processes[0].pid).children()
    process.suspend()
    killing = threading.Timer(0.5, process.kill)
    killing.start()
    with pytest.raises(TrainingError, match=r"rank 1 of trainer.devices=2 ended with exit code"):
        learner.update(random_samples(2), 2)
    killing.join()
    workers.close()


def test_a_rank_that_is_lost_before_it_joins_ends_the_start(tmp_path, monkeypatch):
    workers = Workers(2, CPU, tmp_path, num_threads=1)
    send = workers._send

    def lose_and_send(order, *arguments):
        (process,) = psutil.Process(workers._processes[0].pid).children()
        process.kill()
        process.wait(30)
        send(order, *arguments)

    monkeypatch.setattr(workers, "_send", lose_and_send)
    with pytest.raises(RankLostError, match="rank 1"):
        workers.try_collective(4)
    workers.close()


def test_ranks_do_not_start_after_the_run_has_ended(tmp_path):
    """Its servers may fail while another thread loads the model, which the ranks follow."""
    workers = Workers(2, CPU, tmp_path, num_threads=1)
    workers.close()
    with pytest.raises(TrainingError, match="the run ended"):
        workers.try_collective(4)
    assert not workers._processes


def test_more_devices_than_there_are_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    reject_missing_devices(1, torch.device("cuda"))
    reject_missing_devices(8, CPU)
    with pytest.raises(ConfigError, match=r"trainer.devices=2, but torch sees 1 CUDA"):
        reject_missing_devices(2, torch.device("cuda"))


# In the echo experiment a random model earns different rewards by chance.
RUN = (
    *("conf=echo", "eval.num_tasks=2", "eval.baselines=false", "trainer.tasks_per_step=2"),
    *("trainer.group_size=4", "trainer.tokens_per_batch=128", "trainer.optimizer.type=adamw"),
    *SMALL,
)


def workers_below(folder):
    return [
        process
        # psutil gives None for a process that has just ended
        for process in psutil.process_iter(["cmdline", "cwd"])
        if "openenv_pipe.learner.distributed.worker" in (process.info["cmdline"] or ())
        and process.info["cwd"] == str(folder)
    ]


def test_a_run_has_the_metrics_of_one_and_leaves_no_rank_behind(tmp_path):
    """The run is killed with SIGKILL after two steps."""
    lines = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        devices = (f"trainer.devices={number}", "trainer.parallel=fsdp")
        process = Command(folder, "train", *RUN, *devices)
        try:
            wait_until(lambda p=process: "grpo 2/80" in p.err, "two steps", process)
            ranks = workers_below(folder)
            assert len(ranks) == 2 * (number - 1), "a worker and its guardian"
        finally:
            process.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=120)
        assert workers_below(folder) == []
        lines.append(read_metrics(folder / "runs/echo/0001/metrics.jsonl")[:2])
    for one, two in zip(*lines, strict=True):
        assert one["tokens/trained"] > 0
        # a group that is split over two ranks shares fewer prefixes
        del one["tokens/computed"], two["tokens/computed"]
        assert numbers_of(two) == pytest.approx(numbers_of(one), rel=LOSS_BOUND, abs=LOSS_BOUND)
