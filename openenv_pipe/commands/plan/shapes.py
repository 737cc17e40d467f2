"""Shapes of published models, for plans without their files. Source: their config.json."""

from pathlib import Path

from openenv_pipe.config.schema import HubModelConfig, ModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.memory_estimate import (
    Shape,
    decoder_shape,
    read_folder_shape,
    tiny_shape,
)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, is_tied: bool) -> Shape:
    return decoder_shape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=128,
        vocabulary=151_936,
        is_tied=is_tied,
        has_head_norms=True,
    )


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> Shape:
    return decoder_shape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=128,
        vocabulary=128_256,
        is_tied=False,
        has_head_norms=False,
    )


# By the id on the model hub.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, is_tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, is_tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, is_tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, is_tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, is_tied=False),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(4096, 14336, 32, 32),
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(8192, 28672, 80, 64),
}


def shape_of(model: ModelConfig) -> Shape:
    """Return the shape of a run's model: a folder's, a published one's, or that of `tiny`.

    Raises ConfigError.
    """
    if not isinstance(model, HubModelConfig):
        return tiny_shape(model)
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        shape = read_folder_shape(model, folder)
        if shape is None:
            raise ConfigError(
                f"model.path={model.path!r}: its config.json has other keys than decoders such as "
                "Qwen3, so its shape is not known"
            )
        return shape
    if model.path not in PUBLISHED:
        raise ConfigError(
            f"model.path={model.path!r} is neither a folder nor a model whose shape is known here: "
            f"{', '.join(PUBLISHED)}; download it, and give its folder"
        )
    return PUBLISHED[model.path]
