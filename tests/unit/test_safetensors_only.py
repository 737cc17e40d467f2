"""No pickle is read, wherever a folder of weights offers one."""

import json
import pickle
import re
import shutil

import pytest
import torch
from fakes import CPU, tiny_model, tiny_policy
from safetensors.torch import load_file, save_file

from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import load_weights, save_weights
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.memory_estimate import read_folder_shape


@pytest.fixture(autouse=True)
def _no_torch_load(monkeypatch):
    def load(*arguments, **options):
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", load)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of a whole model and of an adapter."""
    made = {}
    for lora_rank in (0, 2):
        made[lora_rank] = tmp_path_factory.mktemp("weights")
        save_weights(made[lora_rank], tiny_policy(lora_rank=lora_rank), steps=1, warm_start_steps=0)
    return made


@pytest.fixture
def model(folders, tmp_path):
    return shutil.copytree(folders[0], tmp_path / "model")


@pytest.fixture
def adapter(folders, tmp_path):
    return shutil.copytree(folders[2], tmp_path / "adapter")


def hub_model(path, lora_rank=0):
    values = tiny_model(lora_rank=lora_rank).model_dump(mode="json")
    shared = {key: values[key] for key in HubModelConfig.model_fields if key in values}
    return HubModelConfig.model_validate(
        {**shared, "type": "hub", "path": str(path), "revision": None}
    )


def as_pickle(file, to):
    file.unlink()
    (file.parent / to).write_bytes(pickle.dumps({"weights": 1}))


def test_an_adapter_of_a_checkpoint_is_no_pickle(adapter):
    as_pickle(adapter / "adapter_model.safetensors", "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        load_policy(tiny_model(lora_rank=2), seed=0, device=CPU, checkpoint=adapter)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        load_weights(adapter, tiny_policy(lora_rank=2))


def test_an_adapter_of_another_shape_is_a_user_error(adapter):
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        load_policy(tiny_model(lora_rank=3), seed=0, device=CPU, checkpoint=adapter)


def test_the_weights_of_a_model_are_no_pickle(model):
    as_pickle(model / "model.safetensors", "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(hub_model(model), seed=0, device=CPU)
    with pytest.raises(OSError, match="safetensors"):
        load_policy(tiny_model(), seed=0, device=CPU, checkpoint=model)


@pytest.mark.parametrize("with_model", [True, False])
def test_a_base_model_is_no_adapter(model, adapter, with_model):
    """transformers would load the adapter's pickle on top of the model."""
    as_pickle(adapter / "adapter_model.safetensors", "adapter_model.bin")
    for name in ("adapter_config.json", "adapter_model.bin"):
        shutil.copy(adapter / name, model / name)
    if not with_model:
        (model / "config.json").unlink()
    with pytest.raises(ConfigError):
        load_policy(hub_model(model), seed=0, device=CPU)
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load_policy(tiny_model(), seed=0, device=CPU, checkpoint=model)


@pytest.mark.parametrize("name", ["shard.bin", "../elsewhere/model.safetensors", 3])
def test_an_index_names_safetensors_of_its_folder(model, name):
    (model / "model.safetensors").rename(model / "shard.bin")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="names the weights"):
        load_policy(tiny_model(), seed=0, device=CPU, checkpoint=model)


@pytest.mark.parametrize("index", ["null", "{", "[]", '{"weight_map": null}', "[" * 100_000])
def test_a_damaged_index_is_a_user_error(model, index):
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_policy(tiny_model(), seed=0, device=CPU, checkpoint=model)


def test_weights_that_the_configuration_names_are_safetensors(model):
    as_pickle(model / "model.safetensors", "weights.bin")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "weights.bin"}))
    with pytest.raises(ConfigError, match="names the weights"):
        load_policy(hub_model(model), seed=0, device=CPU)


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(model):
    file = model / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "q_proj" in name)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks 1 weights .*such as {re.escape(name)}"):
        load_policy(hub_model(model), seed=0, device=CPU)
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        load_weights(model, tiny_policy())


def test_weights_that_do_not_fit_the_configuration_are_named(model):
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "intermediate_size": 8}))
    with pytest.raises(ConfigError, match=r"6 of them have another shape, such as .*down_proj"):
        load_policy(hub_model(model), seed=0, device=CPU)
    file.write_text(json.dumps({**config, "intermediate_size": [8]}))
    with pytest.raises(
        ConfigError, match=r"'intermediate_size'.* expected int, got list"
    ) as caught:
        load_policy(hub_model(model), seed=0, device=CPU)
    assert f"model.path='{model}'" in str(caught.value)


def test_a_file_of_weights_that_was_cut_off_is_an_error(model):
    """Without a traceback, also before the weights are loaded."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"damaged file \*\.safetensors .*; copy or download it"):
        load_policy(hub_model(model), seed=0, device=CPU)
    with pytest.raises(ConfigError, match=r"model\.safetensors has [\d,]+ bytes; expected the"):
        read_folder_shape(hub_model(model), model)
