"""The learner on two and four processes, with a whole policy each (trainer.parallel=data) or with
shards of one (fsdp), against the learner on one.

Losses agree to 1e-5 and gradients to 1e-4, both relative. `gloo` replaces a GPU's `nccl`.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import (
    CPU,
    GRADIENT_BOUND,
    LOSS_BOUND,
    PLAIN,
    WITH_ALL,
    alike_samples,
    numbers_of,
    random_samples,
    run_config,
    tiny_model,
)
from safetensors.torch import load_file, save_file

from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.build import SeveralDevices
from openenv_pipe.extras.devices.sharded_load import load_sharded_policy
from openenv_pipe.extras.devices.sharded_weights import WholeOnDemand
from openenv_pipe.extras.devices.workers import Workers
from openenv_pipe.learner.checkpoint import load_progress, load_weights, save_progress, save_weights
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models.load import load_policy

# Ranks start slowly: where one number suffices, tests have that of the tests before them.
NUM_RANKS = 4
REPLAY = {"coef": 0.3, "size": 4, "min_reward": None, "per_step": 4}


class Groups:
    """Workers by the number of ranks. Those of another number end: a process has one group."""

    def __init__(self, logs):
        self._logs = logs
        self._workers = None

    def __getitem__(self, num_ranks):
        if num_ranks == 1:
            return None
        if self._workers is None or self._workers.ranks.size != num_ranks:
            self.close()
            self._workers = Workers(num_ranks, CPU, self._logs, num_threads=1)
        return self._workers

    def close(self):
        if self._workers is not None:
            self._workers.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    groups = Groups(tmp_path_factory.mktemp("logs"))
    yield groups
    groups.close()


@pytest.fixture(scope="module", params=[("data", 2), ("fsdp", 2), ("fsdp", 4)], ids=str)
def layout(request):
    """How several ranks divide the policy, and their number."""
    return request.param


def config_of(
    changes, *, lora_rank, num_ranks, num_replicas=1, parallel="fsdp", checkpointing=False
):
    values = {f"trainer.{key}": value for key, value in changes.items()}
    model = tiny_model(lora_rank=lora_rank).model_copy(
        update={"activation_checkpointing": checkpointing}
    )
    values |= {"trainer.parallel": parallel, "trainer.devices": num_ranks}
    values["trainer.replicas"] = num_replicas
    return run_config({**values, "model": model.model_dump()})


def devices_of(config, groups):
    workers = groups[config.trainer.devices]
    return SeveralDevices(config, CPU, workers) if workers else Devices(config, CPU)


def policy_of(config, groups, folder):
    """Return the policy of the ranks; an adapter gets weights that are not zero."""
    policy, _ = devices_of(config, groups).load_policy(None)
    if config.model.lora.rank:
        if not folder.exists():
            whole = load_policy(config.model, seed=config.seed, device=CPU)
            draw = torch.Generator().manual_seed(1)
            for name, values in whole.trained_parameters():
                if "lora_B" in name:
                    values.data = torch.randn(values.shape, generator=draw) * 0.05
            folder.mkdir()
            whole.save_model(folder)
        policy.load_model(folder)
    return policy


def assert_close(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for key, one in theirs.items():
        difference = (ours[key] - one).abs().max()
        assert difference <= bound * one.abs().max() + 1e-8, (key, difference.item())


def first_moments(state):
    return {key: value for key, value in state.items() if key.endswith("exp_avg")}


def saved(folder, policy, learner):
    """Return the weights and the optimizer of a checkpoint, as files have them."""
    (folder / "resume").mkdir(parents=True)
    save_weights(folder, policy, steps=1, warm_start_steps=0)
    save_progress(folder / "resume", policy, learner.optimizer)
    name = "adapter_model" if (folder / "adapter_config.json").exists() else "model"
    return load_file(folder / f"{name}.safetensors"), load_file(
        folder / "resume" / "optimizer.safetensors"
    )


@pytest.mark.parametrize("lora_rank", [0, 3], ids=["full", "lora"])
def test_ranks_give_the_losses_and_gradients_of_one(groups, tmp_path, lora_rank, layout):
    """The gradients are compared by Adam's first moment: a tenth of the gradient after one
    unclipped step. An adapter of rank 3 has rows for fewer than four ranks."""
    samples, seen = random_samples(3, count=7), []
    for parallel, size in (("data", 1), layout):
        config = config_of(PLAIN, lora_rank=lora_rank, num_ranks=size, parallel=parallel)
        policy = policy_of(config, groups, tmp_path / "adapter")
        learner = devices_of(config, groups).learner(policy)
        metrics = learner.update(samples, 1)
        tokens = [(*each.entropy, *each.mismatch) for each in learner.trained_tokens]
        seen.append((metrics, tokens, *saved(tmp_path / str(size), policy, learner)))
    (one, one_tokens, one_weights, one_state), (many, tokens, weights, state) = seen
    for ours, theirs in zip(tokens, one_tokens, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-3), "also those of other ranks"
    assert numbers_of(many) == pytest.approx(numbers_of(one), rel=LOSS_BOUND, abs=LOSS_BOUND)
    assert_close(first_moments(state), first_moments(one_state), GRADIENT_BOUND)
    assert any(value.any() for value in first_moments(state).values())
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in one_weights.items()}


@pytest.mark.parametrize(
    ("lora_rank", "checkpointing"), [(0, True), (4, False)], ids=["full", "lora"]
)
def test_all_that_an_update_may_consist_of(groups, tmp_path, layout, lora_rank, checkpointing):
    """Shared prefixes, a reference, corrections to the step's start, replayed episodes, a bounded
    norm and a batch for fewer ranks than there are work together. The padding rows of an idle rank
    change no number."""
    seen = []
    for parallel, size in (("data", 1), layout):
        shape = {"num_ranks": size, "parallel": parallel, "checkpointing": checkpointing}
        config = config_of(WITH_ALL | {"replay": REPLAY}, lora_rank=lora_rank, **shape)
        policy = policy_of(config, groups, tmp_path / "adapter")
        learner = devices_of(config, groups).learner(policy)
        replayed = random_samples(4, count=3)
        steps = [alike_samples(1, count=5), alike_samples(2, count=5), random_samples(1, count=1)]
        metrics = [
            learner.update(samples, step, Uncomputed(), replayed)
            for step, samples in enumerate(steps, start=1)
        ]
        seen.append((metrics, saved(tmp_path / str(size), policy, learner)[0]))
    (ones, one_weights), (many, weights) = seen
    assert ones[1]["loss/kl"] != 0.0 and ones[1]["loss/replay"] > 0.0
    for one, other in zip(ones, many, strict=True):
        assert numbers_of(other) == pytest.approx(
            numbers_of(one), rel=10 * LOSS_BOUND, abs=LOSS_BOUND
        )
    assert_close(weights, one_weights, GRADIENT_BOUND)


def test_the_local_engine_samples_with_all_ranks(groups, tmp_path):
    """Rank 0 computes each batch, and the others help to gather the weights."""
    logits = []
    for size in (1, NUM_RANKS):
        policy = policy_of(config_of(PLAIN, lora_rank=0, num_ranks=size), groups, tmp_path)
        with torch.inference_mode():
            hidden = policy.hidden(torch.arange(12)[None])
            logits.append(policy.logits(hidden[:, -1]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("lora_rank", [0, 3], ids=["full", "lora"])
def test_publishing(groups, tmp_path, lora_rank):
    """Files, tensors one at a time, adapters and the probe are those of a whole policy."""
    folders, sent, probes = [tmp_path / "whole", tmp_path / "sharded"], [], []
    for size, folder in zip((1, NUM_RANKS), folders, strict=True):
        config = config_of(PLAIN, lora_rank=lora_rank, num_ranks=size)
        policy = policy_of(config, groups, tmp_path / "start")
        publication = devices_of(config, groups).weights(policy)
        for kind, write in (("base", publication.write_base), ("all", publication.write_weights)):
            (folder / kind).mkdir(parents=True)
            write(folder / kind)
        weights = publication.tensors()
        on_demand = [each for each in weights.values() if isinstance(each, WholeOnDemand)]
        assert len(on_demand) == (len(weights) if size > 1 else 0)
        if on_demand:
            weights = {name: each.full_tensor() for name, each in weights.items()}
        sent.append(weights)
        if lora_rank:
            publication.write_adapter(folder / "adapter")
            probes.append(publication.write_probe(folder / "probe", [[1, 2, 3]], 1.0, moves=0.1))
    names = [sorted(path.relative_to(top) for path in top.rglob("*.*")) for top in folders]
    assert names[0] == names[1]
    for name in names[0]:
        one, other = (top / name for top in folders)
        if name.suffix == ".safetensors":
            assert_close(load_file(other), load_file(one), 1e-6)
        else:
            assert other.read_bytes() == one.read_bytes()
    assert_close(sent[1], sent[0], 1e-6)
    assert_close(sent[1], load_file(folders[0] / "all" / "model.safetensors"), 1e-6)
    assert all(np.array_equal(*probes) for _ in probes[:1])


def test_the_warm_start_of_ranks_is_that_of_one(groups, tmp_path):
    seen = []
    for size in (1, NUM_RANKS):
        changes = {"warm_start.optimizer.eps": 1e-3, "tokens_per_batch": 24}
        config = config_of(changes, lora_rank=0, num_ranks=size)
        policy = policy_of(config, groups, tmp_path)
        warm_start = devices_of(config, groups).warm_start(policy)
        metrics = [warm_start.step(random_samples(5, count=7)) for _ in range(2)]
        seen.append((metrics, saved(tmp_path / str(size), policy, warm_start)[0]))
    (ones, one_weights), (many, weights) = seen
    for one, other in zip(ones, many, strict=True):
        assert other == pytest.approx(one, rel=LOSS_BOUND)
    assert_close(weights, one_weights, GRADIENT_BOUND)


def test_two_replicas_of_two_shards_are_one_process(groups, tmp_path):
    """HSDP: the losses, the gradients (by Adam's first moment) and the norm that clips them. Its
    checkpoint continues on two ranks without replicas. In full training and with an adapter."""
    seen = {}
    for size, num_replicas, lora_rank in ((1, 1, 0), (1, 1, 3), (4, 2, 0), (4, 2, 3)):
        shape = {"lora_rank": lora_rank, "num_ranks": size, "num_replicas": num_replicas}
        config, top = config_of(PLAIN, **shape), tmp_path / f"{lora_rank}"
        policy = policy_of(config, groups, tmp_path / "adapter")
        learner = devices_of(config, groups).learner(policy)
        metrics = numbers_of(learner.update(random_samples(3, count=7), 1))
        folder = top / f"{size}"
        seen[size, lora_rank] = (metrics, *saved(folder, policy, learner))
        learner = devices_of(config_of(WITH_ALL, **shape), groups).learner(policy)
        load_progress(folder / "resume", policy, learner.optimizer)
        clipped = numbers_of(learner.update(alike_samples(1, count=5), 2))
        files = saved(top / f"{size}-clipped", policy, learner)
        seen[f"{size} clipped", lora_rank] = (clipped, *files)
    for lora_rank in (0, 3):
        config = config_of(WITH_ALL, lora_rank=lora_rank, num_ranks=2)
        top = tmp_path / f"{lora_rank}"
        policy = policy_of(config, groups, tmp_path / "adapter")
        load_weights(top / "4", policy)
        learner = devices_of(config, groups).learner(policy)  # the reference: the loaded weights
        load_progress(top / "4" / "resume", policy, learner.optimizer)
        clipped = numbers_of(learner.update(alike_samples(1, count=5), 2))
        seen["continued", lora_rank] = (clipped, *saved(top / "2-clipped", policy, learner))
        pairs = [(4, 1), ("4 clipped", "1 clipped"), ("continued", "1 clipped")]
        for ours, theirs in pairs:
            metrics, weights, state = seen[ours, lora_rank]
            known, known_weights, known_state = seen[theirs, lora_rank]
            assert metrics == pytest.approx(known, rel=10 * LOSS_BOUND, abs=LOSS_BOUND)
            assert_close(weights, known_weights, GRADIENT_BOUND)
            assert_close(first_moments(state), first_moments(known_state), GRADIENT_BOUND)


def test_a_checkpoint_is_continued_to_the_bit(groups, layout, tmp_path):
    parallel, size = layout
    config = config_of(WITH_ALL, lora_rank=0, num_ranks=size, parallel=parallel)
    results = []
    for name in ("straight", "continued"):
        policy = policy_of(config, groups, tmp_path)
        learner = devices_of(config, groups).learner(policy)
        if name == "straight":
            learner.update(random_samples(1), 1)
            saved(tmp_path / "1", policy, learner)
        else:
            load_weights(tmp_path / "1", policy)
            load_progress(tmp_path / "1" / "resume", policy, learner.optimizer)
        metrics = numbers_of(learner.update(random_samples(2), 2))
        results.append((metrics, *saved(tmp_path / name, policy, learner)))
    (metrics, *files), (again, *files_again) = results
    assert again == metrics
    for ours, theirs in zip(files_again, files, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_checkpoint_of_four_ranks_continues_on_two_and_on_one(groups, tmp_path):
    """In full training and with an adapter."""
    expected = {}
    for size, lora_rank in ((4, 0), (4, 3), (2, 0), (2, 3), (1, 0), (1, 3)):
        config = config_of(WITH_ALL, lora_rank=lora_rank, num_ranks=size)
        policy = policy_of(config, groups, tmp_path / "adapter")
        learner = devices_of(config, groups).learner(policy)
        checkpoint = tmp_path / f"checkpoint-{lora_rank}"
        if size == 4:
            learner.update(random_samples(1), 1)
            saved(checkpoint, policy, learner)
        else:
            load_weights(checkpoint, policy)
            load_progress(checkpoint / "resume", policy, learner.optimizer)
            assert learner.optimizer.num_steps_taken == 2
        metrics = numbers_of(learner.update(random_samples(2), 2))
        files = saved(tmp_path / f"{size}-{lora_rank}", policy, learner)
        known, known_files = expected.setdefault(lora_rank, (metrics, files))
        assert metrics == pytest.approx(known, rel=LOSS_BOUND, abs=LOSS_BOUND)
        for ours, theirs in zip(files, known_files, strict=True):
            assert_close(ours, theirs, GRADIENT_BOUND)


def test_a_checkpoint_is_the_files_of_one_process(groups, tmp_path):
    """It has the same names, and any program that reads a Hugging Face folder can read it."""
    config = config_of(PLAIN, lora_rank=0, num_ranks=2)
    policy = policy_of(config, groups, tmp_path)
    save_weights(tmp_path / "sharded", policy, steps=0, warm_start_steps=0)
    whole = load_policy(config.model, seed=config.seed, device=CPU)
    save_weights(tmp_path / "whole", whole, steps=0, warm_start_steps=0)
    names = [{file.name for file in (tmp_path / kind).iterdir()} for kind in ("sharded", "whole")]
    assert names[0] == names[1]
    for name in names[0] - {"model.safetensors"}:
        assert (tmp_path / "sharded" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()
    ours, theirs = (
        load_file(tmp_path / kind / "model.safetensors") for kind in ("sharded", "whole")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = load_policy(config.model, seed=9, device=CPU, checkpoint=tmp_path / "sharded")
    assert all(
        torch.equal(*pair)
        for pair in zip(again.model.parameters(), whole.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_a_folder_is_read_part_by_part(groups, tmp_path, dtype):
    """In bfloat16 it is frozen, and products are rounded. The folder has two files."""
    lora_rank = 0 if dtype == "float32" else 3
    config = config_of(PLAIN, lora_rank=lora_rank, num_ranks=2)
    source = load_policy(tiny_model(), seed=7, device=CPU)
    source.model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    source.tokenizer.save_pretrained(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    kept = config.model.model_dump(include={*HubModelConfig.model_fields} - {"type"})
    place = {"type": "hub", "path": str(tmp_path / "model"), "revision": None}
    found = []
    for size in (1, 2):
        model = kept | place | {"dtype": dtype, "autocast": dtype}
        changes = {"model": model, "trainer.parallel": "fsdp", "trainer.devices": size}
        config = run_config(changes | {f"trainer.{key}": each for key, each in PLAIN.items()})
        policy, _ = devices_of(config, groups).load_policy(None)
        learner = devices_of(config, groups).learner(policy)
        found.append(numbers_of(learner.update(random_samples(1), 1)))
    assert found[1] == pytest.approx(found[0], rel=1e-2 if lora_rank else LOSS_BOUND, abs=1e-4)


def test_a_folder_that_needs_conversion_is_rejected(groups, tmp_path):
    config = config_of(PLAIN, lora_rank=0, num_ranks=2)
    whole = load_policy(config.model, seed=0, device=CPU)
    whole.save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"old.{name}": each for name, each in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.embed_tokens\.weight'"):
        load_sharded_policy(
            config.model, seed=0, device=CPU, ranks=groups[2].ranks, checkpoint=tmp_path
        )
    groups.close()  # its ranks have ended with the same error


def test_no_rank_holds_the_whole_policy():
    """Storages of all tensors are counted in each of two processes: after loading, at the
    beginning of the last layer of a pass, and after an update."""
    script = Path(__file__).parents[2] / "benchmarks" / "shard_memory.py"
    sizes = ("--ranks", "2", "--hidden-size", "64", "--layers", "12")
    out = subprocess.run(
        [sys.executable, script, "--json", *sizes],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    for rank in json.loads(out.stdout):
        whole = rank["whole"]
        assert 0.45 * whole < rank["weights"] < 0.6 * whole
        assert rank["states"] < 4 * 0.55 * whole  # weights, gradients and two moments
        # Of 12 layers, the pass has at most two gathered, and gradients of a part of them.
        assert rank["during a pass"] < rank["states"] + 0.45 * whole
