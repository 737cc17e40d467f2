"""Checkpoints of a policy: what is written, and that loading restores the same policy."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from fakes import CPU, random_samples, resume_from, run_config, tiny_model, tiny_policy
from safetensors.torch import load_file

from openenv_pipe.config.schema import HubModelConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import load_progress, save_progress, save_weights
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.load import load_policy

TOKEN_IDS = torch.tensor([[5, 6, 7, 8, 200]])
TEXT = (".json", ".jinja", ".md")


def trained(lora_rank=0, seed=3):
    """A policy after two updates, and its optimizer."""
    policy = tiny_policy(seed=seed, lora_rank=lora_rank)
    trainer = run_config({"trainer.optimizer.lr": 1e-2}).trainer
    learner = Learner(policy, trainer, max_episode_tokens=120, seed=0)
    for step in (1, 2):
        learner.update(random_samples(step), step)
    return policy, learner.optimizer


def saved(folder: Path, lora_rank=0):
    folder.mkdir()
    policy, optimizer = trained(lora_rank)
    save_weights(folder, policy, steps=2, warm_start_steps=3)
    (folder / "resume").mkdir()
    save_progress(folder / "resume", policy, optimizer)
    return policy


def digests(folder: Path):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def logits_of(policy):
    with torch.no_grad():
        return policy.logits(policy.hidden(TOKEN_IDS))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_saved_policy_is_read_as_it_was(tmp_path, lora_rank):
    policy = saved(tmp_path / "it", lora_rank)
    again = load_policy(
        tiny_model(seed=3, lora_rank=lora_rank), seed=4, device=CPU, checkpoint=tmp_path / "it"
    )
    assert torch.equal(logits_of(again), logits_of(policy))
    assert not torch.equal(logits_of(again), logits_of(tiny_policy(seed=3, lora_rank=lora_rank)))
    names = [name for name, _ in policy.trained_parameters()]
    assert [name for name, _ in again.trained_parameters()] == names
    assert again.chat.first_ids([{"role": "user", "content": "a"}]) == [2, 69, 3]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_nothing_is_written_that_has_to_be_unpickled(tmp_path, lora_rank):
    saved(tmp_path / "it", lora_rank)
    for path in (tmp_path / "it").rglob("*.*"):
        assert path.suffix in (".safetensors", *TEXT)
        if path.suffix == ".safetensors":
            assert load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())


def test_an_adapters_checkpoint_has_no_weights_of_the_base_model(tmp_path):
    saved(tmp_path / "it", lora_rank=2)
    names = load_file(tmp_path / "it" / "adapter_model.safetensors")
    assert names
    assert all("lora_" in name for name in names)
    assert not (tmp_path / "it" / "model.safetensors").exists()


def test_the_state_of_the_optimizer_and_the_counters_are_kept(tmp_path):
    saved(tmp_path / "it")
    counters = json.loads((tmp_path / "it" / "counters.json").read_text())
    assert counters == {"steps": 2, "warm_start_steps": 3}
    progress = json.loads((tmp_path / "it" / "resume" / "progress.json").read_text())
    assert progress == {"optimizer_steps": 2}
    tensors = load_file(tmp_path / "it" / "resume" / "optimizer.safetensors")
    num_parameters = len(trained()[0].trained_parameters())
    assert len(tensors) == 3 * num_parameters  # AdamW's two moments and its step count


def test_muon_keeps_a_momentum_for_each_hidden_matrix():
    policy = tiny_policy()
    changes = {"trainer.optimizer.type": "muon", "trainer.optimizer.lr": 1e-2}
    learner = Learner(policy, run_config(changes).trainer, max_episode_tokens=120, seed=0)
    learner.update(random_samples(1), 1)
    state = learner.optimizer.tensors()
    hidden = [p for name, p in policy.trained_parameters() if p.ndim == 2 and "embed" not in name]
    momenta = [name for name in state if name.endswith("momentum_buffer")]
    others = len(policy.trained_parameters()) - len(hidden)
    assert (len(momenta), len(state)) == (len(hidden), len(hidden) + 3 * others)


def test_before_the_first_step_an_optimizer_has_nothing_to_keep(tmp_path):
    policy = tiny_policy()
    save_progress(tmp_path, policy, None)
    assert not (tmp_path / "optimizer.safetensors").exists()
    config = run_config().trainer.optimizer
    optimizer = Optimizer(policy.trained_parameters(), config, 1, precision=torch.float32)
    save_progress(tmp_path, policy, optimizer)
    assert not (tmp_path / "optimizer.safetensors").exists()
    assert json.loads((tmp_path / "progress.json").read_text())["optimizer_steps"] == 0


def test_an_optimizer_that_has_forgotten_its_moments_still_counts_its_steps(tmp_path):
    policy, optimizer = trained()
    optimizer.forget()
    save_progress(tmp_path, policy, optimizer)
    config = run_config().trainer.optimizer
    again = Optimizer(policy.trained_parameters(), config, 4, precision=torch.float32)
    load_progress(tmp_path, policy, again)
    assert (again.num_steps_taken, again.tensors()) == (2, {})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_two_steps_and_two_more_are_four_steps_to_the_bit(tmp_path, lora_rank, optimizer):
    """Trap 26 for the learner alone: weights, optimizer, schedule and reference."""
    changes = {
        "trainer.optimizer.type": optimizer,
        "trainer.optimizer.lr": 1e-2,
        "trainer.optimizer.schedule": "cosine",
        "trainer.optimizer.lr_warmup_steps": 1,
        "trainer.loss.kl.coef": 0.1,
        "trainer.updates_per_step": 2,
        "trainer.steps": 4,
    }
    trainer = run_config(changes).trainer

    def learner():
        policy = tiny_policy(seed=3, lora_rank=lora_rank)
        return Learner(policy, trainer, max_episode_tokens=120, seed=0)

    def advance(it, steps):
        metrics = [it.update(random_samples(step), step) for step in steps]
        untimed = [{key: m[key] for key in m if not key.startswith("time/")} for m in metrics]
        return untimed

    whole = learner()
    metrics = [advance(whole, [1, 2]), advance(whole, [3, 4])]
    first = learner()
    again = [advance(first, [1, 2])]
    second = learner()
    resume_from(first, second, tmp_path)
    again.append(advance(second, [3, 4]))
    assert again == metrics
    for (_, expected), (name, seen) in zip(
        whole.policy.trained_parameters(), second.policy.trained_parameters(), strict=True
    ):
        assert torch.equal(seen, expected), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_equal_trainings_have_equal_digests(tmp_path, lora_rank):
    saved(tmp_path / "one", lora_rank)
    saved(tmp_path / "two", lora_rank)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_a_folder_without_a_model_is_rejected(tmp_path):
    values = tiny_model().model_dump()
    of_tiny = TinyModelConfig.model_fields.keys() - HubModelConfig.model_fields.keys()
    values = {key: value for key, value in values.items() if key not in of_tiny}
    config = run_config(
        {"model": values | {"type": "hub", "path": str(tmp_path), "revision": None}}
    ).model
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(config, seed=0, device=CPU)
