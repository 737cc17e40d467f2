"""The published weights of a policy are the same in memory and in files, and the base model's own
in their names."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openenv_pipe.errors import ConfigError, TrainingError
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline import requirements
from openenv_pipe.pipeline.requirements import REQUIREMENTS
from tests.families import EXPERTS, family_policy, family_run, make_family
from tests.vllm_server import small_config, small_policy

PROMPT = list(range(1, 31))


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_are_those_of_the_files_and_an_adapter_is_merged_into_them(tmp_path, rank):
    policy = small_policy(small_config(f"model.lora.rank={rank}"))
    draw = torch.Generator().manual_seed(3)
    for _, parameter in policy.trained_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    before = {name: values.clone() for name, values in policy.model.state_dict().items()}
    publication = PolicyWeights(policy)
    publication.write_base(tmp_path / "base")
    publication.write_weights(tmp_path / "written")

    weights, written = publication.tensors(), load_file(tmp_path / "written/model.safetensors")
    base = load_file(tmp_path / "base/model.safetensors")
    assert weights.keys() == written.keys() == base.keys()
    assert all(torch.equal(weights[name], written[name]) for name in written)
    changed = {name for name in base if not torch.equal(base[name], written[name])}
    assert bool(changed) == bool(rank)
    assert all("proj" in name for name in changed)
    after = policy.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("write", ["write_base", "write_weights", "write_adapter"])
def test_weights_that_find_no_space_raise_an_error_of_the_folder(tmp_path, monkeypatch, write):
    def full(*arguments, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    publication = PolicyWeights(small_policy(small_config("model.lora.rank=4")))
    monkeypatch.setattr(publication._base, "save_pretrained", full)
    monkeypatch.setattr("openenv_pipe.models.weights.save_file", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"):
        getattr(publication, write)(tmp_path)


def assert_computes_the_same(model, publication):
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    expected = torch.from_numpy(publication.next_logprobs([PROMPT], 1.0))[0]
    torch.testing.assert_close(torch.log_softmax(logits, -1), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture whose first layer is dense."""
    options = {"mlp_only_layers": [0], "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp("mixture") / "qwen3_moe"
    return make_family(folder, "Qwen3MoeConfig", **EXPERTS, **options)


def test_adapters_of_experts_are_merged_and_all_names_are_the_base_models(mixture, tmp_path):
    policy = family_policy(mixture, "model.lora.rank=2")
    publication = PolicyWeights(policy)
    publication.write_weights(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    base = load_file(mixture / "model.safetensors")
    assert {name: each.shape for name, each in written.items()} == {
        name: each.shape for name, each in base.items()
    }
    changed = {name for name in base if not torch.equal(base[name], written[name])}
    for part in ("q_proj", "experts.0.gate_proj", "experts.3.down_proj", "layers.0.mlp.up_proj"):
        assert any(part in name for name in changed), part
    assert not any("mlp.gate.weight" in name for name in changed)
    sent = publication.tensors()
    assert all(torch.equal(sent[name], written[name]) for name in written)

    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert_computes_the_same(model, publication)


def test_a_checkpoint_of_a_mixture_gives_its_adapter_back(mixture, tmp_path):
    policy = family_policy(mixture, "model.lora.rank=2")
    policy.save_model(tmp_path)
    model = family_run(mixture, "model.lora.rank=2").model
    loaded = load_policy(model, seed=1, device=policy.device, checkpoint=tmp_path)
    pairs = zip(policy.trained_parameters(), loaded.trained_parameters(), strict=True)
    assert all(mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]) for mine, theirs in pairs)


def test_an_adapter_of_experts_is_not_given_to_a_server_that_cannot_read_it(mixture, tmp_path):
    adapter = ("model.lora.rank=2", "engine=vllm", "engine.publish=adapter")
    run = family_run(mixture, *adapter)
    with pytest.raises(ConfigError, match=r"experts of a mixture.*engine\.publish=merged"):
        REQUIREMENTS["model"](run)
    attention = "model.lora.target_modules=[q_proj,v_proj]"
    elsewhere = ("engine.launch=attach", "engine.url=http://127.0.0.1:1")
    for fitting in (("engine.publish=merged",), (attention, *elsewhere)):
        REQUIREMENTS["model"](family_run(mixture, "model.lora.rank=2", "engine=vllm", *fitting))
    with pytest.raises(ConfigError, match=r"vLLM's CPU build computes no experts.*publish=merged"):
        REQUIREMENTS["model"](family_run(mixture, *adapter, attention, "device=cpu"))
    with pytest.raises(TrainingError, match=r"experts.*engine\.publish=merged"):
        PolicyWeights(family_policy(mixture, "model.lora.rank=2")).write_adapter(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_all_of_gpt_oss_goes_to_servers_on_gpus_through_files_alone(tmp_path, monkeypatch):
    """vLLM's own transfers end in its reload, which leaves the experts as they were."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = make_family(
        tmp_path, "GptOssConfig", **experts, layer_types=["sliding_attention", "full_attention"]
    )
    monkeypatch.setattr(requirements, "select_device", lambda name: torch.device("cuda"))
    REQUIREMENTS["model"](family_run(folder, "engine=vllm"))
    run = family_run(folder, "engine=vllm", "engine.weight_transfer=broadcast")
    with pytest.raises(ConfigError, match=r"set engine\.weight_transfer=files"):
        REQUIREMENTS["model"](run)


def test_experts_have_no_dropout_and_the_message_says_so(mixture):
    with pytest.raises(ConfigError, match=r"set model\.lora\.dropout=0"):
        family_policy(mixture, "model.lora.rank=2", "model.lora.dropout=0.1")


def test_a_name_of_no_layer_is_rejected_beside_those_of_layers():
    run = small_config("model.lora.rank=2", "model.lora.target_modules=[q_proj,v_porj]")
    with pytest.raises(ConfigError, match=r"no layer .* called 'v_porj'.*q_proj, up_proj, v_proj"):
        REQUIREMENTS["model"](run)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_of_two_modules_that_share_a_matrix_is_rejected(target):
    adapter = ("model.lora.rank=2", f"model.lora.target_modules=[q_proj,{target}]")
    run = small_config(*adapter)
    with pytest.raises(ConfigError, match=rf"adapts .*{target}.* is one matrix with .*leave it"):
        REQUIREMENTS["model"](run)
    with pytest.raises(ConfigError, match="is one matrix with"):
        small_policy(run)


def test_an_adapter_on_a_head_of_its_own_is_merged_into_it(mixture, tmp_path):
    adapter = ("model.lora.rank=2", "model.lora.target_modules=[lm_head,embed_tokens,o_proj]")
    publication = PolicyWeights(family_policy(mixture, *adapter))
    publication.write_weights(tmp_path)
    assert_computes_the_same(AutoModelForCausalLM.from_pretrained(tmp_path), publication)


def test_weights_with_other_names_or_shapes_are_not_written(tmp_path):
    policy = small_policy(small_config())
    publication = PolicyWeights(policy)
    norm = policy.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight[:-1])
    with pytest.raises(TrainingError, match=r"norm\.weight has shape \[127\] instead of \[128\]"):
        publication.write_weights(tmp_path)
    norm.renamed = norm.weight
    del norm.weight
    for publish in (lambda: publication.write_weights(tmp_path), publication.tensors):
        with pytest.raises(TrainingError, match=r"missing model\.norm\.weight, unknown .*renamed"):
            publish()
    assert not list(tmp_path.iterdir())
