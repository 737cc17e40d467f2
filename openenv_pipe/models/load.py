"""From a model block to a policy: built from a seed, read from a folder, or fetched from a hub."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from openenv_pipe.config.schema import HubModelConfig, ModelConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models import tiny
from openenv_pipe.models.attention.packed import use_packed_attention
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.quantization import quantize

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_device(name: str) -> torch.device:
    """The device that `device` names; "auto" is CUDA where there is one. Raises ConfigError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device; set device=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_policy(
    config: ModelConfig, *, seed: int, device: torch.device, checkpoint: Path | None = None
) -> Policy:
    """The policy at its start, or as a checkpoint's folder holds it. Raises ConfigError.

    `seed` draws a new adapter's weights; those of a tiny model come from its own.
    """
    transformers.logging.disable_progress_bar()  # the run has one of its own
    tokenizer = load_tokenizer(config)
    full_checkpoint = checkpoint if config.lora.rank == 0 else None
    if isinstance(config, TinyModelConfig):
        model = _build_tiny(config, tokenizer, full_checkpoint)
    else:
        model = _load_hub(config, full_checkpoint)
    _refuse_sliding_attention(model)
    use_packed_attention(model)
    if config.quantization == "nf4":
        quantize(model, precision=_DTYPES[config.autocast], device=device)
    if config.lora.rank:
        torch.manual_seed(seed)
        with warnings.catch_warnings():  # peft 0.21 asks transformers 5 by an old name
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            model = _with_adapter(model, config, checkpoint)
    return Policy(
        model,
        tokenizer,
        device=device,
        autocast=_DTYPES[config.autocast],
        activation_checkpointing=config.activation_checkpointing,
    )


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer with the chat template that the block asks for. Raises ConfigError."""
    if isinstance(config, TinyModelConfig):
        tokenizer: Any = tiny.build_tokenizer()
    else:
        with _readable_errors(config):
            tokenizer = AutoTokenizer.from_pretrained(config.path, revision=config.revision)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def _build_tiny(config: TinyModelConfig, tokenizer: Any, checkpoint: Path | None) -> Any:
    if checkpoint is not None:
        return _read(str(checkpoint), dtype=_DTYPES[config.dtype])
    torch.manual_seed(config.seed)
    model: Any = Qwen3ForCausalLM(tiny.model_config(config, tokenizer))
    return model.to(_DTYPES[config.dtype])


def _load_hub(config: HubModelConfig, checkpoint: Path | None) -> Any:
    with _readable_errors(config):
        return _read(
            str(checkpoint or config.path),
            dtype=_DTYPES[config.dtype],
            revision=None if checkpoint else config.revision,
        )


@contextlib.contextmanager
def _readable_errors(config: HubModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path={config.path!r} cannot be loaded: {first_line} Give a folder with "
            "config.json and safetensors weights, or an id on a hub that this machine reaches; "
            "model=tiny needs neither"
        ) from None


def _read(path: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",  # the engine's masks are made for it
        **options,
    )


def _refuse_sliding_attention(model: Any) -> None:
    config = model.config.get_text_config()
    default = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    kinds = set(getattr(config, "layer_types", None) or default)
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"model.path: this model has layers of {', '.join(sorted(kinds))}; engine=local keeps "
            "full attention only, so choose a model without sliding windows or linear attention"
        )


def _with_adapter(model: Any, config: ModelConfig, checkpoint: Path | None) -> Any:
    if checkpoint is not None:
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    lora = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # fractions work
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules={config.lora.target_modules!r} does not fit the model: "
            f"{error}; all-linear fits any"
        ) from None
