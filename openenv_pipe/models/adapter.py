"""Low-rank adapters (LoRA): which layers of a model get one, and what is left out.

peft reads `all-linear` as every linear layer. That includes routers, so that each update would
change which experts are chosen; `out_proj` of Mamba layers, whose fused kernels read its matrix
without the adapter, and which peft rejects for some families; and vision towers. Where peft adapts
the experts of a mixture, it skips linear layers that are named like an expert's matrices. Here,
`all-linear` is every linear layer below the decoder except routers, Mamba's `out_proj` and layers
that share one matrix, as the blocks of Zamba 2 do, plus the experts where peft knows their
matrices.
"""

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from openenv_pipe.config.schema import ModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.architecture_check import find_decoder
from openenv_pipe.models.safetensors_only import load_adapter, plain_name
from openenv_pipe.models.vision import vision

ALL_LINEAR = "all-linear"
# What transformers calls the layer that scores the experts, or that weighs a shared one.
ROUTERS = ("gate", "router", "wg", "modality_router", "shared_expert_gate")
# The names of experts' matrices before transformers stacks them, which other layers may share.
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")

OTHER_VALUES = ("bias", "A_log")  # they have two dimensions, but are no factors of a product


def with_adapter(model: Any, config: ModelConfig, checkpoint: Path | None) -> Any:
    """Add the adapter that `model.lora` describes, with the weights of a checkpoint if given.

    Raises ConfigError: the adapter does not fit the model.
    """
    seeing = vision()
    lora = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # fractions work
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
        # Adapters are for the language model alone.
        exclude_modules=(
            seeing.vision_modules if model.config.model_type in seeing.model_types else None
        ),
    )
    if isinstance(config.lora.target_modules, list):
        _reject_unknown_layers(model, config.lora.target_modules)
    if config.lora.target_modules == ALL_LINEAR:
        _select_all_linear(model, lora, is_quantized=config.quantization != "none")
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers by an old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            # peft 0.21 looks among modules for the experts that it gives other ranks, but they are
            # parameters, which do get these ranks.
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not")
            # `_reject_tied_adapter` makes this an error.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied")
            model = get_peft_model(model, lora)
    except (ValueError, re.error) as error:
        advice = f"{ALL_LINEAR} fits every model"
        if config.lora.dropout and "lora_dropout" in str(error):
            advice = "set model.lora.dropout=0, because adapters of experts have none"
        raise ConfigError(
            f"model.lora.target_modules={config.lora.target_modules!r} does not fit the model: "
            f"{str(error).splitlines()[0]:.200}; {advice}"
        ) from None
    _reject_tied_adapter(model, config)
    if checkpoint is not None:
        load_adapter(model, checkpoint, "cpu")
    return model


def adapts_experts(model: Any) -> bool:
    """Return whether a model's adapter adds to matrices that are not layers, as experts' are."""
    return any(isinstance(module, ParamWrapper) for module in model.modules())


def is_mixture(model: Any) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def describe_adapter(model: Any) -> str:
    """Say how many matrices of each kind a model's adapter adds to, and which it leaves out.

    Embeddings, heads and what lies outside the decoder are not mentioned.
    """
    adapted: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    names = {
        plain_name(f"{path}.{getattr(module, 'parameter_name', 'weight')}")
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    decoder = find_decoder(model.get_base_model())
    prefix = next(path for path, module in model.named_modules() if module is decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)) or ".lora_" in path:
            continue
        for name, values in module.named_parameters(recurse=False):
            if values.ndim >= 2 and not name.endswith(OTHER_VALUES):
                whole = plain_name(f"{prefix}.{path}.{name}")
                (adapted if whole in names else left_out)[_kind(whole)] += 1
    text = f"adapters of rank {model.peft_config['default'].r}: {_counts(adapted)}"
    return f"{text}; none: {_counts(left_out)}" if left_out else text


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(kinds.items()))


def _kind(name: str) -> str:
    """Return the last part of a matrix's name that is no number; for experts, the last two."""
    parts = [each for each in name.removesuffix(".weight").split(".") if not each.isdecimal()]
    return ".".join(parts[-2:]) if parts[-2] == "experts" else parts[-1]


def _select_all_linear(model: Any, lora: LoraConfig, *, is_quantized: bool) -> None:
    """Replace `all-linear` in peft's configuration by names of layers and of experts' matrices."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    decoder = find_decoder(model)
    prefix = next(name for name, each in model.named_modules() if each is decoder)
    chosen = {name for name in layers if name.startswith(f"{prefix}.")}
    chosen -= {name for name in chosen if _leaf(name) in ROUTERS or _is_in_mamba(model, name)}
    every = model.named_parameters(remove_duplicate=False)
    holders = Counter(id(values) for _, values in every)
    chosen -= {name for name in chosen if holders[id(layers[name].weight)] > 1}
    # For the mixtures that it knows, peft names the matrices of the experts and of the router.
    convert_peft_config_for_transformers(lora, model, None)
    experts = {each for each in lora.target_parameters or () if "." not in each}
    # peft would take such a layer's name for an expert's again, but not the name of its matrix.
    hidden = {name for name in chosen if experts and _leaf(name) in EXPERT_NAMES}
    names = {_leaf(name) for name in chosen - hidden}
    lora.target_modules = sorted(names)
    matrices = set() if is_quantized else {f"{name}.weight" for name in hidden}
    lora.target_parameters = sorted(experts | matrices) or None
    lora.exclude_modules = sorted(each for each in layers.keys() - chosen if _leaf(each) in names)


def _is_in_mamba(model: Any, name: str) -> bool:
    """Return whether a layer is the `out_proj` of Mamba, whose parameter `D` few others have."""
    return _leaf(name) == "out_proj" and hasattr(model.get_submodule(name.rpartition(".")[0]), "D")


def _leaf(name: str) -> str:
    """Return the last part of a name; if that is a number, as of layers, the whole name."""
    leaf = name.rpartition(".")[2]
    return name if leaf.isdecimal() else leaf


def _reject_unknown_layers(model: Any, target_modules: list[str]) -> None:
    """Raise ConfigError if no layer has one of the names; peft would ignore such a name."""
    paths = [f".{path}" for path, _ in model.named_modules()]
    unknown = [
        each for each in target_modules if not any(path.endswith(f".{each}") for path in paths)
    ]
    if unknown:
        layers = find_decoder(model).named_modules()
        names = {_leaf(path) for path, each in layers if isinstance(each, nn.Linear)}
        raise ConfigError(
            f"model.lora.target_modules={target_modules!r}: no layer of the model is called "
            f"{unknown[0]!r}; expected names such as {', '.join(sorted(names))}"
        )


def _reject_tied_adapter(model: Any, config: ModelConfig) -> None:
    """Raise ConfigError if a matrix has an adapter in one of two modules that share it.

    After merging, the two would differ, although config.json says that they are one matrix.
    """
    names: dict[int, list[str]] = {}
    for name, values in model.get_base_model().named_parameters(remove_duplicate=False):
        names.setdefault(id(values), []).append(name)
    for shared in names.values():
        adapted = next((name for name in shared if ".base_layer." in name), None)
        if adapted is not None and len(shared) > 1:
            other = next(name for name in shared if name != adapted)
            raise ConfigError(
                f"model.lora.target_modules={config.lora.target_modules!r} adapts "
                f"{plain_name(adapted)}, which is one matrix with {plain_name(other)} in this "
                "model, so that the two would differ after training; leave "
                "it out, or set model.lora.rank=0"
            )
