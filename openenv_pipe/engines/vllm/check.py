"""What a run and `openenv-pipe check` verify before vLLM servers start."""

import asyncio

from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.config.schema.engine_base import PublishMode
from openenv_pipe.engines.vllm.installed import Build, find_build, require_installed
from openenv_pipe.engines.vllm.publish_mode import check_transfer
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint, sleep_level
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.http import bearer, fetch

ANSWER_LIMIT_S = 10.0


def check_servers(config: RunConfig) -> str:
    """Check that vLLM, or whatever else starts its servers, is installed. Raises ConfigError."""
    from openenv_pipe.models.load import is_vision_model, select_device  # imports torch

    engine = config.engine
    assert isinstance(engine, VllmEngineConfig)
    if config.cluster.serves_on_nodes:
        return ""  # each node has its own installation, and checks it
    if engine.launch == "managed":
        build: Build = "cuda" if select_device(config.device).type == "cuda" else "cpu"
        require_installed(build, sees_images=is_vision_model(config.model))
    else:
        check_launch(engine)
    return ""  # `try_servers` says what it found


def try_servers(config: RunConfig) -> str:
    """Describe what is installed on this machine, or which servers answer. Raises ConfigError."""
    assert isinstance(config.engine, VllmEngineConfig)
    if config.cluster.serves_on_nodes:
        return ""
    build: Build = "cpu" if config.device == "cpu" else find_build()
    mode = publish_mode(config)
    assert mode is not None
    return check_engine(config.engine, build, mode)


def check_engine(config: VllmEngineConfig, build: Build, mode: PublishMode) -> str:
    """Describe what is installed, or which servers answer.

    Raises ConfigError: vLLM is missing, a server does not answer, or settings do not fit together.
    """
    footprint = LearnerFootprint(on_gpu=build == "cuda")
    sleep_level(config, footprint, mode=mode)
    if not footprint.on_gpu:  # else it depends on the number of GPUs
        check_transfer(config, footprint)
    if config.launch == "attach":
        return _check_attached(config)
    if config.launch != "managed":
        return check_launch(config)
    installed = require_installed(build)
    packages = ", ".join(f"{name} {version}" for name, version in installed.packages.items())
    return f"{installed.package} {installed.version} is installed, with {packages}"


def check_launch(config: VllmEngineConfig) -> str:
    """Check that what starts the servers is there, beyond vLLM's installation on this machine.

    The `check` of a launch is called with the engine's configuration, and describes in a line what
    is started. Raises ConfigError.
    """
    check = block_types("engine.launch")[config.launch].check
    return str(load(check)(config)) if check else ""


def _check_attached(config: VllmEngineConfig) -> str:
    for url in config.urls:
        try:
            status, _ = asyncio.run(
                fetch(url, "/health", timeout_s=ANSWER_LIMIT_S, access=bearer(config.api_key))
            )
        except OSError as error:
            raise ConfigError(f"engine.url={url} does not answer: {error}") from error
        if status in (401, 403):
            raise ConfigError(
                f"{url}/health answers {status}: set engine.api_key to the server's key, "
                "preferably as ${oc.env:VLLM_API_KEY}"
            )
        if status != 200:
            raise ConfigError(f"{url}/health answers {status}, expected 200 from a vLLM server")
    return f"{' and '.join(config.urls)} {'answers' if len(config.urls) == 1 else 'answer'}"
