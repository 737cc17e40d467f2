"""Read weights from safetensors only, because other formats are pickles, which run code.

transformers and peft prefer safetensors, but fall back to pickles for an adapter that lies beside
a model, and for files that an index names. Whatever reads weights calls these functions.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.vision import vision
from openenv_pipe.registry import if_command

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"


def read_model(path: str, *, revision: str | None = None, **options: Any) -> Any:
    """Read a language or vision-language model from a folder or a hub.

    `options` go to transformers.

    Raises:
        ConfigError: It is an adapter, names weights in another format, or has a damaged file. Or it
            lacks weights or has some of another shape, which transformers would draw at random.
        OSError, ValueError: It cannot be read.
    """
    reject_other_weights(path, revision)
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    text_config = text_config_within(config)
    whole_class: Any = model_class(config) if text_config is None else AutoModelForImageTextToText
    try:
        model, found = whole_class.from_pretrained(
            path,
            revision=revision,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are rejected below, by name.
            **options,
        )
    except SafetensorError as error:
        raise ConfigError(
            f"{path} has a damaged file *.safetensors ({error}); copy or download it again"
        ) from None
    if unlike := sorted(found["mismatched_keys"]):
        name, shape, expected_shape = unlike[0]
        raise ConfigError(
            f"{path}: config.json does not fit the weights: {len(unlike)} of them have another "
            f"shape, such as {name} with {[*shape]} instead of {[*expected_shape]}; copy both from "
            "the same model"
        )
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {len(missing)} weights of its architecture "
            f"({type(model).__name__}), such as {missing[0]}; expected all of them, or a "
            "config.json of the architecture that they are of"
        )
    return model if text_config is None else _language_model_within(model, text_config)


def text_config_within(config: Any) -> Any:
    """Return the config of the language model within a model that also sees or hears, or None.

    It is for models, such as Mistral 3, of which transformers has no causal language model.
    """
    found = getattr(config, "text_config", None)
    is_composite = type(found) in MODEL_FOR_CAUSAL_LM_MAPPING and not (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.model_type in vision().model_types
    )
    return found if is_composite else None


def _language_model_within(whole: Any, text_config: Any) -> Any:
    """Return the language model within a whole model, with its weights."""
    text_config.tie_word_embeddings = whole.config.tie_word_embeddings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config)
    decoder = whole.get_decoder()
    if type(decoder) is not type(model.base_model):
        raise ConfigError(
            f"{type(whole).__name__} has a {type(decoder).__name__} where "
            f"{type(model).__name__} has a {type(model.base_model).__name__}, so that its language "
            "model cannot be trained by itself; choose a model for text"
        )
    setattr(model, model.base_model_prefix, decoder)
    model.set_output_embeddings(whole.get_output_embeddings())
    return model.eval()


def model_class(config: Any) -> Any:
    sees = config.model_type in vision().model_types
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def reject_other_weights(path: str, revision: str | None = None) -> None:
    """Raise ConfigError if the model is an adapter, or names weights in another format."""
    if find_file(path, ADAPTER_CONFIG, revision):
        raise ConfigError(
            f"{path} has an {ADAPTER_CONFIG}: it is an adapter, or a model with one beside it; "
            "give a model without" + if_command("export", ", such as `openenv-pipe export` writes")
        )
    named = []
    if index := find_file(path, INDEX, revision):
        named += list(_read_object(index, "weight_map").values())
    if config := find_file(path, "config.json", revision):
        explicit = _read_object(config).get("transformers_weights")
        named += [] if explicit is None else [explicit]
    for name in named:
        if not str(name).removesuffix(".index.json").endswith(".safetensors") or "/" in str(name):
            raise ConfigError(
                f"{path} names the weights {name!r}; expected files *.safetensors of its own "
                "folder, because other formats are pickles, which run code"
            )


def load_adapter(model: Any, folder: Path, device: Any) -> None:
    """Load the adapter of a checkpoint into a model that has one of the same shape.

    Raises ConfigError: The folder has no such adapter.
    """
    try:
        tensors = load_file(folder / ADAPTER, device=str(device))
        found: Any = set_peft_model_state_dict(model, tensors)
        unfit = [*found.unexpected_keys, *(key for key in found.missing_keys if ".lora_" in key)]
        problem = f"{len(unfit)} tensors do not fit, such as {unfit[0]}" if unfit else None
    except (OSError, SafetensorError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    if problem is not None:
        raise ConfigError(
            f"cannot load {folder / ADAPTER} (pickles such as adapter_model.bin are not read): "
            f"{problem}"
        )


def plain_name(name: str) -> str:
    """Return the name that a weight has without adapters. Peft nests its layers, also twice."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def find_file(path: str, name: str, revision: str | None) -> Path | None:
    """Return a small file of a folder or a hub's repository, None if there is no such file."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).exists() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError:
        return None


def _read_object(file: Path, key: str | None = None) -> dict[str, Any]:
    """Read a JSON object, or the one below a key. Raises ConfigError."""
    try:
        values = json.loads(file.read_text())
        found = values if key is None else values[key]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error!r}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {found!r:.80}; expected keys and values")
    return found
