"""Load the policy of a model block: built from a seed, or read from a folder or a model hub."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from openenv_pipe.config.schema import HubModelConfig, ModelConfig, RunConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models import tiny
from openenv_pipe.models.adapter import with_adapter
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.rendering import check_template
from openenv_pipe.models.chat.template_source import one_template, pinned_template, template_with
from openenv_pipe.models.forward.architecture_check import (
    LONGROPE,
    find_max_length,
    fix_rope_table,
    original_lengths,
    reject_unsupported,
)
from openenv_pipe.models.forward.attention.packed import use_packed_attention
from openenv_pipe.models.forward.logit_transform import ADVICE
from openenv_pipe.models.hub import (
    find_model_folder,
    is_on_this_machine,
    model_source,
    readable_errors,
)
from openenv_pipe.models.model_files import TOKENIZER, check_model_file
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.quantization import find_quantizable, quantize
from openenv_pipe.models.safetensors_only import (
    find_file,
    model_class,
    read_model,
    text_config_within,
)
from openenv_pipe.models.vision import vision
from openenv_pipe.registry import if_command

VOCABULARIES = (  # a tokenizer has one of them
    *(TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_device(name: str) -> torch.device:
    """Return the device for a value of the key `device`; "auto" is CUDA if torch sees a GPU.

    Raises ConfigError: the name is "cuda", and torch sees no GPU, or it is another name.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device; set device=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_policy(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    checkpoint: Path | None = None,
    max_tokens: int | None = None,
) -> Policy:
    """Load the untrained policy, or the weights in a checkpoint's folder.

    seed: the seed of a new adapter's weights. `config.seed` is that of a tiny model.
    max_tokens: of an episode, for `fix_rope_table`.

    Raises ConfigError: the model cannot be read, or its architecture cannot be trained.
    """
    transformers.logging.disable_progress_bar()  # a run shows its own progress
    chat = load_chat(config)
    full_checkpoint = checkpoint if config.lora.rank == 0 else None
    if isinstance(config, TinyModelConfig):
        model = build_tiny(config, chat.tokenizer, full_checkpoint)
    else:
        with readable_errors(config):
            model = read_model(
                str(full_checkpoint or model_source(config)),
                revision=None if full_checkpoint else config.revision,
                dtype=DTYPES[config.dtype],
            )
    reject_unsupported(model)
    fix_rope_table(model, max_tokens)
    use_packed_attention(model)
    if config.quantization == "nf4":
        quantize(model, precision=DTYPES[config.autocast], device=device)
    if config.lora.rank:
        torch.manual_seed(seed)
        model = with_adapter(model, config, checkpoint)
    options: dict[str, Any] = {
        "device": device,
        "autocast": DTYPES[config.autocast],
        "activation_checkpointing": config.activation_checkpointing,
    }
    if chat.images is None:
        return Policy(model, chat, **options)
    return vision().make_policy(model, chat, **options)


def check_architecture(config: RunConfig) -> Any:
    """Check whether the model can be trained as configured, without its weights.

    A model of the hub has to be on this machine (see `find_model_folder`).

    Returns the model with its adapter, on torch's device `meta`.

    Raises ConfigError: the architecture cannot be trained, the adapter fits none of its layers, or
    episodes may have more tokens than the model has positions.
    """
    model = build_empty(config.model)
    reject_unsupported(model)
    reject_unsupported_vision(config)
    reject_long_episodes(config, model)
    if config.model.quantization == "nf4":
        find_quantizable(model.get_decoder())
    return with_adapter(model, config.model, None) if config.model.lora.rank else model


def reject_long_episodes(config: RunConfig, model: Any) -> None:
    """Raise ConfigError if rows may have more tokens than the model computes as it was trained."""
    max_length, max_tokens = find_max_length(model), config.max_episode_tokens
    if max_length is not None and max_tokens > max_length:
        is_tiny = isinstance(config.model, TinyModelConfig)
        raise ConfigError(
            f"experiment {config.name!r} with env {config.env.name!r}: "
            f"env.max_episode_tokens={max_tokens} is more than the {max_length} positions of the "
            "model; lower it, or "
            f"{'raise model.max_length' if is_tiny else 'choose a model with a longer context'}"
        )
    served_length = config.engine.served_length
    for kind, original in original_lengths(model).items():
        if served_length is None or served_length <= original:
            continue
        if kind == LONGROPE and max_tokens <= original:
            raise ConfigError(
                f"engine.max_model_len={served_length} is more than the {original} positions up to "
                f"which rope_type={kind} has its short factors, and env.max_episode_tokens="
                f"{max_tokens} is not, so that vLLM would use the long factors and the learner the "
                f"short ones; set engine.max_model_len to {original}"
            )
        if kind != LONGROPE:
            raise ConfigError(
                f"engine.max_model_len={served_length} is more than the {original} positions up to "
                f"which vLLM computes rope_type={kind} as the learner does; lower it and "
                f"env.max_episode_tokens to {original}, or set engine=local"
            )


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer, with `model.chat_template` if it is set, and with its variables.

    The template's clock is pinned.

    Raises ConfigError.
    """
    if isinstance(config, TinyModelConfig):
        tokenizer: Any = tiny.build_tokenizer()
    else:
        with readable_errors(config):
            if find_model_folder(config) is None and (
                downloaded := find_file(config.path, TOKENIZER, config.revision)
            ):
                check_model_file(downloaded)
            source = model_source(config)
            _reject_missing_tokenizer(config, Path(source))
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=config.revision, trust_remote_code=False
            )
        if config.chat_template is None and tokenizer.chat_template is not None:
            tokenizer.chat_template = one_template(tokenizer.chat_template, config.path)
            check_template(tokenizer.chat_template, config.path)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if tokenizer.chat_template is not None:
        time = config.template_time
        moment = datetime.now() if time is None else datetime.fromisoformat(time)
        template = template_with(tokenizer.chat_template, config.chat_template_kwargs)
        tokenizer.chat_template = pinned_template(template, moment)
    return tokenizer


def _reject_missing_tokenizer(config: HubModelConfig, folder: Path) -> None:
    """Raise ConfigError if a local folder has no vocabulary: transformers makes an empty one."""
    if folder.is_dir() and not any((folder / name).exists() for name in VOCABULARIES):
        raise ConfigError(
            f"model.path={config.path!r}: {folder} has no {TOKENIZER} nor another file of a "
            "tokenizer; copy those of the model, or save them with tokenizer.save_pretrained"
        )


def load_chat(config: ModelConfig) -> ChatFormat:
    """Load the chat format, without the model. Raises ConfigError."""
    tokenizer = load_tokenizer(config)
    images = None
    if (found := _vision_config(config)) is not None:
        assert isinstance(config, HubModelConfig)
        images = vision().load_images(config, found, tokenizer)
    # A prompt with images is not rendered again (`reject_unsupported_vision`).
    history = "append" if images and config.history == "auto" else config.history
    return ChatFormat(tokenizer, history, images, _eos_ids(config, tokenizer))


def _eos_ids(config: ModelConfig, tokenizer: Any) -> set[int]:
    """Return the end tokens that the tokenizer and the model's `generation_config.json` list."""
    listed = {tokenizer.eos_token_id}
    path = None
    if isinstance(config, HubModelConfig):
        with readable_errors(config):
            path = find_file(model_source(config), "generation_config.json", config.revision)
    if path is not None:
        found = json.loads(path.read_text()).get("eos_token_id")
        listed |= {*found} if isinstance(found, list) else {found}
    listed.discard(None)
    if wrong := [each for each in listed if type(each) is not int or each < 0]:
        raise ConfigError(f"{path}: eos_token_id has to be token ids, not {wrong[0]!r}")
    return listed


def _vision_config(config: ModelConfig) -> Any:
    """Return the config of a vision-language model; None for models of text alone."""
    if isinstance(config, TinyModelConfig):
        return None
    with readable_errors(config):
        found = AutoConfig.from_pretrained(
            model_source(config), revision=config.revision, trust_remote_code=False
        )
    return found if found.model_type in vision().model_types else None


def is_vision_model(config: ModelConfig) -> bool:
    """Return whether the model is a vision-language model; False if it is not on this machine."""
    return is_on_this_machine(config) and _vision_config(config) is not None


def reject_vision_model(config: ModelConfig) -> None:
    """Raise ConfigError if the model is a vision-language model, which `serve` does not serve."""
    if (found := _vision_config(config)) is not None:
        raise ConfigError(
            f"serve is not supported for vision-language models ({found.model_type})"
            + if_command("export", "; export the model with `openenv-pipe export`")
        )


def reject_unsupported_vision(config: RunConfig) -> None:
    """Raise ConfigError if the run needs what is not supported with vision-language models."""
    if config.engine.capabilities.needs_tokenizer and _vision_config(config.model) is not None:
        vision().reject_unsupported(config)


def reject_rerendered(config: RunConfig, chat: ChatFormat) -> None:
    """Raise ConfigError if the loss needs the parts of prompts, which rendering anew loses."""
    loss = config.trainer.loss
    needing = {"trainer.loss.echo_coef": loss.echo_coef, "trainer.loss.kl.hint": loss.kl.used_hint}
    for key, value in needing.items():
        if value and chat.history == "rerender":
            off = "null" if isinstance(value, str) else "0"
            raise ConfigError(
                f"{key}={value} with model.history={config.model.history}: the chat template "
                "renders each prompt anew, so it is not known which of its tokens the environment "
                f"wrote; set {key}={off}, or a model.chat_template that keeps earlier turns"
            )


def build_empty(config: ModelConfig) -> Any:
    """Build the model on torch's device `meta`: it has shapes and no values."""
    with torch.device("meta"):
        if isinstance(config, TinyModelConfig):
            return Qwen3ForCausalLM(tiny.model_config(config, tiny.build_tokenizer()))
        with readable_errors(config):
            folder = find_model_folder(config)
            assert folder is not None  # the caller has checked that
            found = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            found = text_config_within(found) or found
            try:
                return model_class(found).from_config(found)
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(
                    f"model.path={config.path!r}: {type(found).__name__} cannot be built without "
                    f"weights ({str(error).splitlines()[0]:.100}); {ADVICE}"
                ) from None


def build_tiny(config: TinyModelConfig, tokenizer: Any, checkpoint: Path | None) -> Any:
    if checkpoint is not None:
        return read_model(str(checkpoint), dtype=DTYPES[config.dtype])
    torch.manual_seed(config.seed)
    model: Any = Qwen3ForCausalLM(tiny.model_config(config, tokenizer))
    return model.to(DTYPES[config.dtype])
