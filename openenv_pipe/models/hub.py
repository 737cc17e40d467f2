"""Where the files of a model are: in a folder, or in the hub's cache on this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

from openenv_pipe.config.schema import HubModelConfig, ModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.model_files import check_model_folder
from openenv_pipe.models.safetensors_only import VISION_MODELS
from openenv_pipe.system.out_of_memory import as_out_of_memory


def is_on_this_machine(config: ModelConfig) -> bool:
    """Return whether the model needs no download."""
    return not isinstance(config, HubModelConfig) or find_model_folder(config) is not None


def find_model_folder(config: HubModelConfig) -> Path | None:
    """Return the folder that `model.path` names, or the one in the hub's cache.

    Returns None if the model has to be downloaded. A cached config.json without weights, as an
    interrupted download leaves it, does not count.

    Raises:
        ConfigError: the path is neither a folder nor a valid id of a model hub, or the model's
            configuration or tokenizer cannot be read within limits.
    """
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
        except HFValidationError:
            raise ConfigError(
                f"model.path={config.path!r} is neither a folder on this machine nor an id such as "
                "Qwen/Qwen3-0.6B"
            ) from None
        if not isinstance(found, str) or not any(Path(found).parent.glob("*.safetensors")):
            return None
        folder = Path(found).parent
    with readable_errors(config):
        check_model_folder(folder)
    return folder


def find_generation_config(config: HubModelConfig) -> Path | None:
    """Return where a model's `generation_config.json` is on this machine; None if it has none."""
    name, folder = "generation_config.json", Path(config.path).expanduser()
    if folder.is_dir():
        return path if (path := folder / name).is_file() else None
    with readable_errors(config):
        try:
            return Path(hf_hub_download(config.path, name, revision=config.revision))
        except EntryNotFoundError:
            return None


@contextlib.contextmanager
def readable_errors(config: HubModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if as_out_of_memory(error) is not None:
            raise
        first_line = str(error).strip().splitlines()[0]
        if "Unrecognized configuration class" in first_line:
            raise ConfigError(
                f"model.path={config.path!r} is neither a causal language model for text nor a "
                f"vision-language model that can be trained ({', '.join(VISION_MODELS)}); choose "
                "one of these"
            ) from None
        raise ConfigError(
            f"model.path={config.path!r} cannot be loaded: {first_line} Set it to a folder with "
            "config.json and safetensors weights, or to an id on a hub that this machine can "
            "reach; model=tiny needs neither"
        ) from None
