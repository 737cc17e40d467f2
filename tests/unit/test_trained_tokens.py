"""What is recorded of trained tokens: the learner's numbers, files, and the viewer's columns."""

import dataclasses
import gzip
import math

import numpy as np
import pytest
import run_samples
import torch
from fakes import alike_samples, random_samples, tiny_policy, trainer_config

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.web.episodes import show_tokens
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.learner.learner import Learner
from openenv_pipe.runs.episodes import episodes_path
from openenv_pipe.runs.trained_tokens import (
    read_trained_tokens,
    tokens_path,
    write_trained_tokens,
)
from openenv_pipe.types import TrainedTokens


def trained(policy, samples, **changes) -> list[TrainedTokens]:
    """Return what an update records."""
    learner = Learner(policy, trainer_config(changes), max_episode_tokens=120, seed=0)
    learner.update(samples, step=1)
    return learner.trained_tokens


def computed(policy, sample) -> tuple[np.ndarray, np.ndarray]:
    """Compute entropy and mismatch of a sample alone."""
    batch = pack([sample], share=False)
    with torch.no_grad():
        logprobs, entropy = policy.logprobs(batch, 1.0)
    return entropy.numpy(), (logprobs - batch.logprobs).numpy()


@pytest.mark.parametrize("make", [random_samples, alike_samples], ids=["apart", "shared"])
def test_each_sample_has_the_numbers_of_its_own_tokens(make):
    """However samples are split into batches, and whether they share prefixes."""
    policy, samples = tiny_policy(), make(3)
    expected = [computed(policy, sample) for sample in samples]
    found = trained(tiny_policy(), samples, tokens_per_batch=60)
    assert len(found) == len(samples) > 2
    for tokens, (entropy, mismatch) in zip(found, expected, strict=True):
        assert tokens.entropy.dtype == np.float16
        assert tokens.entropy == pytest.approx(entropy, rel=2e-3, abs=1e-3)
        assert tokens.mismatch == pytest.approx(mismatch, rel=2e-3, abs=1e-3)


def test_a_sample_without_trained_tokens_has_none():
    samples = random_samples(3)
    nothing = dataclasses.replace(samples[0], loss_mask=[False] * len(samples[0].loss_mask))
    found = trained(tiny_policy(), [nothing, *samples[1:]])
    assert [tokens is None for tokens in found] == [True] + [False] * (len(samples) - 1)


def test_the_mismatch_is_unknown_where_the_start_of_the_step_was_not_computed():
    samples = random_samples(3)
    found = trained(tiny_policy(), samples, updates_per_step=2)
    unknown = [bool(np.isnan(tokens.mismatch).all()) for tokens in found]
    assert 0 < sum(unknown) < len(samples)
    assert all(np.isfinite(tokens.entropy).all() for tokens in found)
    correction = trainer_config().loss.correction.model_dump() | {"type": "truncate"}
    again = trained(tiny_policy(), samples, updates_per_step=2, **{"loss.correction": correction})
    assert all(np.isfinite(tokens.mismatch).all() for tokens in again)


@pytest.fixture
def recorded(tmp_path):
    """A run of one step with the tokens of one of its episodes; and these."""
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=1)
    (group, _) = run_samples.groups(seed=1)
    (sample,) = episode_samples(group.id, group.episodes[1], [0.5] * 3)
    num_tokens = sum(sample.loss_mask)
    entropy = np.linspace(0, 2, num_tokens).astype(np.float16)
    mismatch = np.full(num_tokens, 1e-4, np.float16)
    mismatch[0] = math.nan
    path = tokens_path(episodes_path(folder.path, 1))
    write_trained_tokens(path, [sample], [TrainedTokens(entropy=entropy, mismatch=mismatch)])
    return folder, group.episodes[1], path, entropy


def test_what_is_written_is_read(recorded):
    _, episode, path, entropy = recorded
    ((key, found),) = read_trained_tokens(path).items()
    assert key == ("1/0", 1)
    assert (found.turns, found.entropy.tolist()) == ([0, 1, 2], entropy.tolist())
    by_turn = found.by_turn(episode)
    assert [len(by_turn[turn][0]) for turn in range(3)] == [6, 6, 6]
    assert by_turn[2][0] == entropy.tolist()[12:]
    assert math.isnan(by_turn[0][1][0])
    assert by_turn[0][1][1] == pytest.approx(1e-4, rel=1e-2)
    episode.turns[1].completion_ids.pop()
    assert found.by_turn(episode) == {}, "the numbers are not those of this episode"
    del episode.turns[1:]
    assert found.by_turn(episode) == {}


def test_the_viewer_shows_them_of_trained_episodes(recorded):
    folder, _, path, entropy = recorded
    store = RunStore(folder.path.parents[1])

    def shown(line):
        return show_tokens(store, "smoke/0001", {"step": "1", "line": line}, trust=False)

    tokens = shown("2")
    assert [each for each in tokens["entropy"] if each is not None] == entropy.tolist()
    assert [each is not None for each in tokens["entropy"]] == [bool(m) for m in tokens["mask"]]
    assert len(tokens["mismatch"]) == len(tokens["ids"])
    assert "entropy" not in shown("1"), "it was not trained on"
    path.write_bytes(b"damaged")
    assert "entropy" not in shown("2")


@pytest.mark.parametrize(
    "row",
    [
        "[]",
        "{",
        '{"group": "1/0", "member": 0, "turns": [0], "entropy": "!", "mismatch": ""}',
        '{"group": "1/0", "member": 0, "turns": ["0"], "entropy": "", "mismatch": ""}',
        '{"group": "1/0", "member": 0, "turns": 3, "entropy": "", "mismatch": ""}',
        '{"group": [], "member": 0, "turns": [], "entropy": "", "mismatch": ""}',
        '{"group": "1/0", "member": 0, "turns": [], "entropy": 3, "mismatch": ""}',
        '{"group": "1/0", "member": 0, "turns": [], "entropy": "AAA=AA", "mismatch": "AA=="}',
    ],
)
def test_damaged_files_are_rejected(row, tmp_path):
    path = tmp_path / "tokens_000001.jsonl.gz"
    path.write_bytes(gzip.compress(row.encode()))
    with pytest.raises(RunFolderError):
        read_trained_tokens(path)
