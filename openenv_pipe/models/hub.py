"""Where the files of a model are on this machine, and how they get here.

A model is a folder or an id on a hub, or an extra makes its folder here once: from a file of
another format, or from what it gets elsewhere, for machines that do not reach the hub.
"""

import asyncio
import contextlib
import platform
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError

from openenv_pipe.config.schema import HubModelConfig, ModelConfig
from openenv_pipe.config.schema.model import ModelSource
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.model_files import check_model_folder
from openenv_pipe.models.vision import vision
from openenv_pipe.registry import extras, load
from openenv_pipe.system.out_of_memory import as_out_of_memory

HUB_TIMEOUT_S = 10.0
Notify = Callable[[str], None]
ADVICE = (
    "set it to a folder with config.json and safetensors weights, or to an id on a hub that this "
    "machine can reach; model=tiny needs neither"
)
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # of a hub's repository


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeModel:
    """A folder with a model, which an extra makes once in this user's cache."""

    folder: Path  # exists once it is made
    about: str  # for people: what it is made of, or by which command if it is not on the hub
    is_on_hub: bool  # and taken from there where it can be had
    make: Callable[[Notify], Awaitable[Path]]  # raises ConfigError


def find_made_model(config: HubModelConfig) -> MadeModel | None:
    """Return how an extra makes the model, None if none does. Raises ConfigError."""
    for extra in extras():
        made: MadeModel | None = load(extra.made_model)(config) if extra.made_model else None
        if made is not None:
            return made
    return None


def is_on_this_machine(config: ModelConfig) -> bool:
    """Return whether the model needs no download."""
    return not isinstance(config, HubModelConfig) or find_model_folder(config) is not None


def find_model_folder(config: HubModelConfig) -> Path | None:
    """Return the folder that `model.path` names, or the one in a cache of this machine.

    Returns None if the model has to be downloaded or made (see `provide_model`). A cached
    config.json without weights, as an interrupted download leaves it, does not count.

    Raises ConfigError: the path is neither a folder, nor a file that an extra reads, nor an id of a
    model hub, or the model's configuration or tokenizer cannot be read within limits.
    """
    path, made = Path(config.path).expanduser(), find_made_model(config)
    if made and not made.is_on_hub:
        folder = made.folder if made.folder.is_dir() else None
    else:
        folder = path if path.is_dir() else _find_cached(config, made)
    if folder is not None:
        with readable_errors(config):
            check_model_folder(folder)
    return folder


def _find_cached(config: HubModelConfig, made: MadeModel | None) -> Path | None:
    """Return the folder in the hub's cache, else the one that was made. Raises ConfigError."""
    try:
        found = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
    except HFValidationError:
        raise ConfigError(
            f"model.path={config.path!r} is neither a folder nor a GGUF file on this machine, nor "
            "an id such as Qwen/Qwen3-0.6B"
        ) from None
    if isinstance(found, str) and any(Path(found).parent.glob("*.safetensors")):
        return Path(found).parent
    return made.folder if made and made.folder.is_dir() else None


def model_source(config: HubModelConfig) -> str:
    """Return what transformers and vLLM read: a folder of this machine, or the id on the hub.

    Raises ConfigError: see `find_model_folder`, or an extra has not made it yet.
    """
    path = Path(config.path).expanduser()
    if path.is_dir():
        return str(path)
    folder, made = find_model_folder(config), find_made_model(config)
    if folder is None and made and not made.is_on_hub:
        raise ConfigError(
            f"model.path={config.path!r} has not been converted to safetensors on this machine; "
            f"{made.about}"
        )
    return str(folder) if made and made.folder == folder else config.path


def substitute_of(config: ModelConfig) -> str | None:
    """Return what stands for the hub's model on this machine, for people; None if nothing does."""
    if not isinstance(config, HubModelConfig) or Path(config.path).expanduser().is_dir():
        return None
    made = find_made_model(config)
    if made is None or not made.is_on_hub or find_model_folder(config) != made.folder:
        return None
    return made.about


def served_source(config: ModelConfig) -> ModelSource | None:
    """Return the base model that vLLM servers load themselves; None if the run writes it for them.

    Raises ConfigError, as `model_source`.
    """
    if config.source is None or not isinstance(config, HubModelConfig):
        return None
    return replace(config.source, path=model_source(config))


def reject_unreachable(config: HubModelConfig) -> None:
    """Ask the hub for a model. Raises ConfigError if the hub does not have it or is unreachable."""
    try:
        HfApi().model_info(config.path, revision=config.revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # no network, no such model, no permission
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.path={config.path!r} is neither a local folder nor fully cached, and asking "
            f"the model hub for it failed: {first_line}"
        ) from error


async def provide_model(config: ModelConfig, notify: Notify) -> None:
    """Let an extra make the model, if one does, unless the model is here or on the hub.

    Raises ConfigError: the hub does not have it, what it is made of cannot be downloaded or read,
    or the cache cannot be written.
    """
    if not isinstance(config, HubModelConfig):
        return
    folder, made = find_model_folder(config), find_made_model(config)
    if made is not None and not made.is_on_hub:
        await made.make(notify)
        return
    if folder is not None:
        return
    try:
        await asyncio.to_thread(reject_unreachable, config)
    except ConfigError as error:
        if made is None:
            raise ConfigError(f"{error}; {ADVICE}") from error
        notify(f"{error}\nusing {made.about} in its place")
        await made.make(notify)


def download_missing(config: ModelConfig) -> None:
    """Download all of a model of the hub into the hub's cache, unless it is on this machine.

    Raises ConfigError: the download failed.
    """
    if isinstance(config, HubModelConfig) and find_model_folder(config) is None:
        with readable_errors(config):
            snapshot_download(config.path, revision=config.revision, allow_patterns=FILES)
        if find_model_folder(config) is None:  # offline, what is there of it is returned
            raise ConfigError(
                f"the machine {platform.node()} has no *.safetensors of model.path={config.path}; "
                "download the model there, or name a folder that all nodes have"
            )


@contextlib.contextmanager
def readable_errors(config: HubModelConfig) -> Iterator[None]:
    try:
        yield
    except StrictDataclassError as error:  # a value of config.json has another type
        text = " ".join(str(error).split())
        raise ConfigError(f"model.path={config.path!r}: config.json: {text}; {ADVICE}") from None
    except (OSError, ValueError) as error:
        if as_out_of_memory(error) is not None:
            raise
        first_line = str(error).strip().splitlines()[0]
        trained = ", ".join(vision().model_types) or "none"
        if "Unrecognized configuration class" in first_line:
            raise ConfigError(
                f"model.path={config.path!r} is neither a causal language model for text nor a "
                f"vision-language model that can be trained ({trained}); choose one of these"
            ) from None
        raise ConfigError(
            f"model.path={config.path!r} cannot be loaded: {first_line.rstrip('.')}; {ADVICE}"
        ) from None
