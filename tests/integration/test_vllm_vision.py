"""A vLLM server that sees the images of observations, with a small vision-language model."""

import pytest
import torch

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.installed import require_images
from openenv_pipe.errors import EngineMissingError
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run
from tests.fakes import FakeHost, all_episodes, collect, run_config
from tests.integration.test_vision_train import RUN, write_block
from tests.vision_models import (
    ADAPTER,
    image,
    play,
    samples_of,
    trained_logprobs,
    write_vision_model,
)
from tests.vllm_server import EAGER, LORA_RANK, installed_vllm, opened, vllm_server

pytestmark = pytest.mark.vllm
BOUND = 1e-4  # of the difference of two logprobs, in float32
HEAD_SIZE = 32  # the smallest that vLLM supports on a CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, ...]:
    """Return the overrides that choose the model."""
    folder = write_vision_model(tmp_path_factory.mktemp("model"), head_size=HEAD_SIZE)
    values = ("model.lora.rank=0", "model.dtype=float32", "model.autocast=float32")
    return ("model=hub", f"model.path={folder}", *values)


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    installed = installed_vllm()
    if isinstance(installed, str):
        pytest.skip(installed)
    try:
        require_images("cpu")
    except EngineMissingError as error:
        pytest.skip(f"not installed: {error}")
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_server(installed, folder, *model, EAGER, sees_images=True) as server:
        yield server


@pytest.fixture(autouse=True)
async def base_weights(served):
    """Restores the server's base model after a test that has replaced all weights."""
    yield
    client = VllmClient(served.url, api_key=served.key, request_timeout_s=60)
    async with client, client.replacing_weights():
        await client.load_weights(served.base, "0")


def largest_difference(policy, samples) -> float:
    """Return the largest difference of a sampled token's logprob from the trainer's."""
    sampled = pack(samples, share=False).logprobs
    assert len(sampled) > 20
    return (trained_logprobs(policy, samples) - sampled).abs().max().item()


@pytest.mark.parametrize("lora_rank", [0, LORA_RANK])
async def test_sampler_and_trainer_agree_on_images(served, model, tmp_path, lora_rank):
    """Over turns that each show an image, and after new weights of all parts of the model."""
    rank = f"model.lora.rank={lora_rank}"
    limit = "env.max_episode_tokens=400"
    draw = torch.Generator().manual_seed(1)
    async with opened(served, tmp_path, *model, rank, limit) as (engine, policy):
        for version in (1, 2):
            for _, values in policy.trained_parameters():
                values.data += 0.05 * torch.randn(values.shape, generator=draw)
            await engine.publish(version)
            measured = await engine.metrics()
            assert measured["logprob_check/difference"] < BOUND < measured["logprob_check/moved"]
            groups = await collect(
                policy,
                config=run_config({"env.adapter": ADAPTER, "env.max_episode_tokens": 400}),
                host=FakeHost(play),
                num_tasks=4,
                engine=engine,
            )
            samples = samples_of(groups)
            assert {len(each.turns) for each in all_episodes(groups)} == {2}
            assert {len(each.images) for each in samples} == {2, 3}
            assert largest_difference(policy, samples) < BOUND
    for sample in samples:  # The test would notice other images of the same size.
        sample.images = {
            name: image(99, each["width"], each["height"]) for name, each in sample.images.items()
        }
    assert largest_difference(policy, samples) > 100 * BOUND


def test_two_steps_on_images(served, model, tmp_path):
    """`train` samples from the server what it learns from, and publishes all weights to it."""
    path = next(each for each in model if each.startswith("model.path="))
    changes = ("trainer.max_staleness=0", "trainer.steps=2", "eval.num_tasks=2")
    given = (*RUN, path, "engine=vllm", *served.attach, *changes)
    code, out, err = run(write_block(tmp_path), "train", *given)
    assert code == 0, out + err
    steps = read_metrics(tmp_path / "runs/colours/0001/metrics.jsonl")
    assert [each["step"] for each in steps] == [1, 2]
    for each in steps:
        assert each["mismatch/max"] < BOUND
        assert each["logprob_check/difference"] < BOUND < each["logprob_check/moved"]
