"""Shapes of published models, for plans without their files. Source: their config.json."""

from functools import partial
from pathlib import Path

from openenv_pipe.config.schema import HubModelConfig, ModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.memory_estimate import Shape, decoder_shape, read_folder_shape, tiny_shape


def _decoder(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    *,
    vocabulary: int,
    has_head_norms: bool,
    is_tied: bool = False,
) -> Shape:
    return decoder_shape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=128,
        vocabulary=vocabulary,
        is_tied=is_tied,
        has_head_norms=has_head_norms,
    )


_qwen3 = partial(_decoder, vocabulary=151_936, has_head_norms=True)
_llama3 = partial(_decoder, vocabulary=128_256, has_head_norms=False)

# By the id on the model hub.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, is_tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, is_tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
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
