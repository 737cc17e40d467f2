"""A run and its learner on two devices, here two CPU processes, and the end of one of them.

`test_sharding.py` compares what they compute with one process.
"""

import threading

import psutil
import pytest
import torch
from fakes import CPU, LOSS_BOUND, PLAIN, numbers_of, random_samples, run_config, tiny_model

from openenv_pipe.errors import ConfigError, RankLostError, TrainingError
from openenv_pipe.extras.devices import workers as workers_module
from openenv_pipe.extras.devices.learner_group import LearnerGroup
from openenv_pipe.extras.devices.workers import Workers
from openenv_pipe.learner.devices import reject_missing_devices
from openenv_pipe.models.load import load_policy
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.process import ManagedProcess
from tests.commands import SMALL, Command, wait_until


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    workers = Workers(2, CPU, tmp_path_factory.mktemp("logs"), num_threads=2)
    yield workers
    workers.close()


def learner_of(workers):
    values = {f"trainer.{key}": value for key, value in PLAIN.items()}
    config = run_config({**values, "model": tiny_model().model_dump()})
    return LearnerGroup(load_policy(config.model, seed=config.seed, device=CPU), config, workers)


def test_a_rank_whose_end_nobody_inside_a_kernel_sees_ends_the_run(workers, monkeypatch):
    """The rank is suspended, so its connections stay open, as they would between GPUs."""
    learner = learner_of(workers)
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
    learner = learner_of(workers)
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
        if "openenv_pipe.extras.devices.worker" in (process.info["cmdline"] or ())
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
        assert numbers_of(two) == pytest.approx(numbers_of(one), rel=LOSS_BOUND, abs=LOSS_BOUND)
