"""Models whose rotary angles depend on the length of a row get one table of them for a run."""

import pytest
import torch
from fakes import random_samples

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.models.load import check_architecture, load_policy
from tests.families import (
    engine_difference,
    family_run,
    learner_difference,
    make_family,
    own_logprobs,
)

ORIGINAL_LENGTH = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number for number in range(8)],
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "factor": 32.0,
}


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    options = {"sliding_window": None, "rope_parameters": LONGROPE}
    options["original_max_position_embeddings"] = ORIGINAL_LENGTH
    return make_family(tmp_path_factory.mktemp("longrope"), "Phi3Config", **options)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    options = {"rope_parameters": rope, "max_position_embeddings": ORIGINAL_LENGTH}
    return make_family(tmp_path_factory.mktemp("dynamic"), "LlamaConfig", **options)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_longest_episode_chooses_one_table_of_angles_for_all_rows(kind, request):
    folder = request.getfixturevalue(kind)
    for num_tokens in (ORIGINAL_LENGTH, 2 * ORIGINAL_LENGTH):
        run = family_run(folder, f"env.max_episode_tokens={num_tokens}", "env.max_reply_tokens=8")
        check_architecture(run)
        policy = load_policy(run.model, seed=0, device=torch.device("cpu"), max_tokens=num_tokens)
        assert check_forward(policy, num_tokens) is None
        assert policy.sampler is (Sampler.FAST if kind == "dynamic" else Sampler.RAGGED)
        # A prompt, and rows that are shorter and longer than the original length. The second turn
        # of the short one is padded to that of the longest.
        lengths = [num_tokens, 9, num_tokens - 2]
        assert engine_difference(policy, folder, lengths, num_tokens) < 1e-4
        assert learner_difference(policy, folder, num_tokens=num_tokens) < 1e-4
        policy.keep_reference()
        batch = pack(random_samples(2), share=policy.packs_rows)
        with torch.inference_mode():
            learned, reference = (
                policy.logprobs(batch, 1.0)[0],
                policy.reference_logprobs(batch, 1.0),
            )
        assert torch.equal(learned, reference)


def test_the_two_tables_of_longrope_differ(longrope):
    """Else the test before it could not fail."""
    ids = list(range(5, 45))
    short, long = (own_logprobs(longrope, ids, num_tokens=length) for length in (40, 65))
    assert (short - long).abs().max() > 0.1


def test_episodes_are_not_longer_than_dynamic_rope_is_made_for(dynamic):
    with pytest.raises(ConfigError, match="257 is more than the 256 positions of the model"):
        check_architecture(family_run(dynamic, "env.max_episode_tokens=257"))


def test_vllm_has_the_table_of_the_learner(longrope, dynamic):
    """vLLM chooses that of longrope by `max_model_len`, and has but one of dynamic rope."""

    def check(folder, num_tokens, served):
        keys = ("engine=vllm", "env.max_reply_tokens=8", f"env.max_episode_tokens={num_tokens}")
        check_architecture(family_run(folder, *keys, f"engine.max_model_len={served}"))

    for folder, num_tokens, served in (
        (longrope, 64, 64),
        (longrope, 65, 65),
        (longrope, 65, 200),
        (dynamic, 64, 64),
    ):
        check(folder, num_tokens, served)
    with pytest.raises(ConfigError, match=r"=65 is more .* set engine.max_model_len to 64"):
        check(longrope, 64, 65)
    with pytest.raises(ConfigError, match=r"max_model_len=65 is more .* or set engine=local"):
        check(dynamic, 64, 65)
