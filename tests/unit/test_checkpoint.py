"""Checkpoints: what is written, and that reading gives the same policy."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from fakes import CPU, random_samples, run_config, tiny_model, tiny_policy
from safetensors.torch import load_file

from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import save_checkpoint
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.load import load_policy

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
    save_checkpoint(folder, policy, optimizer, steps=2, warm_start_steps=3)
    return policy


def digests(folder: Path):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


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
    for path in (tmp_path / "it").iterdir():
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
    assert counters == {"steps": 2, "warm_start_steps": 3, "optimizer_steps": 2}
    tensors = load_file(tmp_path / "it" / "optimizer.safetensors")
    num_parameters = len(trained()[0].trained_parameters())
    assert len(tensors) == 3 * num_parameters  # AdamW's two moments, and its count of steps


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


def test_a_checkpoint_without_an_optimizer_or_before_its_first_step(tmp_path):
    policy = tiny_policy()
    for name, optimizer in (("none", None), ("fresh", trained()[1].__class__)):
        folder = tmp_path / name
        folder.mkdir()
        if optimizer is not None:
            config = run_config().trainer.optimizer
            optimizer = optimizer(policy.trained_parameters(), config, 1)
        save_checkpoint(folder, policy, optimizer, steps=0)
        assert not (folder / "optimizer.safetensors").exists()
        assert json.loads((folder / "counters.json").read_text())["optimizer_steps"] == 0


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_equal_trainings_have_equal_digests(tmp_path, lora_rank):
    saved(tmp_path / "one", lora_rank)
    saved(tmp_path / "two", lora_rank)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_a_folder_without_a_model_is_refused(tmp_path):
    values = tiny_model().model_dump()
    values = {key: values[key] for key in ("lora", "dtype", "autocast", "chat_template")}
    config = run_config(
        {"model": values | {"type": "hub", "path": str(tmp_path), "revision": None}}
    ).model
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(config, seed=0, device=CPU)
