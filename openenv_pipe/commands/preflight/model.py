"""Whether the model is there, with a chat template that can be trained on, and fits this machine.

Nothing is downloaded.
"""

from collections.abc import Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.preflight.machine import disk_line, memory_line
from openenv_pipe.config.schema import HubModelConfig, RunConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.models.memory_estimate import Shape, folder_shape, tiny_shape

HUB_TIMEOUT_S = 10.0


def check_model(config: RunConfig) -> Iterator[Line]:
    if not config.engine.capabilities.can_train:
        return
    _refuse_missing_package(config)
    shape, line = _find_model(config.model)
    yield line
    if shape is None:
        text = "not estimated: the model's size is known after its download"
        yield Line("memory", Result.WARN, text)
        return
    yield _chat_line(config)
    yield memory_line(config, shape)
    yield disk_line(config, shape)


def _refuse_missing_package(config: RunConfig) -> None:
    """Of what is kept in fewer bits."""
    optimizers = {"trainer.optimizer": config.trainer.optimizer}
    if config.trainer.warm_start.steps:
        optimizers["trainer.warm_start.optimizer"] = config.trainer.warm_start.optimizer
    needing = [f"{key}.type={o.type}" for key, o in optimizers.items() if o.type == "adamw_8bit"]
    if config.model.quantization != "none":
        needing.append(f"model.quantization={config.model.quantization}")
    if needing:
        from openenv_pipe.models.quantization import load_bitsandbytes  # brings torch

        load_bitsandbytes(needing[0])


def _chat_line(config: RunConfig) -> Line:
    from openenv_pipe.models.load import load_tokenizer  # brings transformers

    ChatFormat(load_tokenizer(config.model))
    return Line("chat", Result.OK, "the template keeps earlier turns as they were written")


def _find_model(model: TinyModelConfig | HubModelConfig) -> tuple[Shape | None, Line]:
    if isinstance(model, TinyModelConfig):
        shape = tiny_shape(model)
        text = f"built from the seed, {shape.num_parameters / 1e6:.2f} million parameters"
        return shape, Line("model", Result.OK, text)
    folder = Path(model.path).expanduser()
    where = "folder" if folder.is_dir() else "cache"
    found = folder if folder.is_dir() else _cached_folder(model)
    if found is None:
        return None, _online_line(model)
    try:
        shape = folder_shape(found)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={model.path!r} ({found}) cannot be read: {error}; expected config.json "
            "and *.safetensors of a causal language model"
        ) from error
    text = f"{model.path} ({where}), {shape.num_parameters / 1e9:.2f} billion parameters"
    return shape, Line("model", Result.OK, text)


def _cached_folder(model: HubModelConfig) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:
        raise ConfigError(
            f"model.path={model.path!r} is neither a folder here nor an id such as Qwen/Qwen3-0.6B"
        ) from None
    return Path(found).parent if isinstance(found, str) else None


def _online_line(model: HubModelConfig) -> Line:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(model.path, revision=model.revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # no network, no such model, no permission: all are the answer
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.path={model.path!r} is no folder, is not cached, and cannot be had from the "
            f"model hub: {first_line}"
        ) from error
    return Line("model", Result.OK, f"{model.path} is on the model hub and will be downloaded")
