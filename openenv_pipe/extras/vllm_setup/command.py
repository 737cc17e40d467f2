"""`openenv-pipe engine command`: how to start the servers that a run with launch=attach needs."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import yaml

from openenv_pipe.config.compose import compose
from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.installed import Build, environment_dir, python_path
from openenv_pipe.engines.vllm.launch import MODULE
from openenv_pipe.engines.vllm.publish_mode import transfer_backend
from openenv_pipe.engines.vllm.server_command import (
    HOSTS_VARIABLE,
    HUB_CACHE,
    INSIDE_CONTAINER,
    KEY_VARIABLE,
    MOUNTS,
    ServerSpec,
    hub_cache,
    server_arguments,
    server_variables,
)
from openenv_pipe.engines.vllm.weights_folder import IN_MEMORY, parent_folder
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import served_source
from openenv_pipe.models.load import is_vision_model

DEFAULT_URL = "engine.url=http://127.0.0.1:8000"
ATTACH = ("engine=vllm", "engine.launch=attach")
# Never printed: the server gets it from this variable, and does not start without it.
GIVEN_KEY = f"${{{KEY_VARIABLE}:?set it to a secret, and engine.api_key to the same}}"


def server_command(
    overrides: Sequence[str], build: Build, form: Literal["shell", "compose"]
) -> str:
    """Return shell commands, or a compose file, that start the servers of engine.url.

    overrides: the arguments of `train`. engine=vllm and engine.launch=attach are added, and
        a URL if there is none. Raises ConfigError: a server cannot load the configured model.
    """
    has_url = any(each.lstrip("+").startswith("engine.url=") for each in overrides)
    url = () if has_url else (DEFAULT_URL,)
    device = f"device={build}"  # with the defaults of a machine that the server is for
    config = compose([device, *overrides, *ATTACH, *url]).config
    engine = config.engine
    assert isinstance(engine, VllmEngineConfig)
    spec = _spec(config, engine, build)
    addresses = [urlsplit(each) for each in engine.urls]
    if form == "shell":
        return "\n\n".join(_shell_command(spec, engine, each) for each in addresses)
    services = {f"vllm-{n}": _service(spec, engine, each) for n, each in enumerate(addresses)}
    return yaml.safe_dump({"services": services}, sort_keys=False, width=sys.maxsize).rstrip()


def _spec(config: RunConfig, engine: VllmEngineConfig, build: Build) -> ServerSpec:
    model = config.model
    source = served_source(model)
    if source is None:
        raise ConfigError(
            f"model.type={model.type}, model.quantization={model.quantization}: a run writes "
            "the files of such a model itself, so a server that was started before cannot load it; "
            "set engine.launch=managed, or model=hub with model.path and no quantization"
        )
    mode = publish_mode(config)
    assert mode is not None
    return ServerSpec(
        model=source.path,
        revision=source.revision,
        build=build,
        dtype=engine.served_precision(model.autocast),
        lora_rank=model.lora.rank if mode == "adapter" else 0,
        sees_images=is_vision_model(model),
        sleeps=engine.sleep in ("level1", "level2"),
        transfer_backend=transfer_backend(engine, mode, build),
    )


def _variables(spec: ServerSpec, engine: VllmEngineConfig, inside: str) -> dict[str, str | None]:
    """Return the variables of a server; None: the value that its caller has."""
    written = {name: text for name, text in engine.variables.items() if text is not None}
    known = server_variables(spec, engine.model_copy(update={"variables": written}), inside)
    return {**known, **engine.variables}


def _shell_command(spec: ServerSpec, engine: VllmEngineConfig, address: SplitResult) -> str:
    variables = _variables(spec, engine, python_path(spec.sees_images))
    # The server inherits those without a value from the shell.
    words = [f"{name}={shlex.quote(text)}" for name, text in variables.items() if text is not None]
    words += [f"{HOSTS_VARIABLE}={address.hostname}", f'{KEY_VARIABLE}="{GIVEN_KEY}"']
    python = environment_dir(spec.build) / "bin" / "python"
    words.append(f"{shlex.quote(str(python))} -m {MODULE}")
    for argument in server_arguments(spec, engine, address.hostname or "", address.port or 80):
        if argument.startswith("--"):
            words.append(argument)
        else:
            words[-1] += f" {shlex.quote(argument)}"
    return " \\\n  ".join(words)


def _service(spec: ServerSpec, engine: VllmEngineConfig, address: SplitResult) -> Mapping[str, Any]:
    port, model, weights = address.port or 80, Path(spec.model), parent_folder(engine.weights_dir)
    volumes = [f"{folder}:{inside}:ro" for folder, inside in MOUNTS.items()]
    if weights != IN_MEMORY:  # which `ipc: host` shares
        volumes.append(f"{weights}:{weights}:ro")
    volumes.append(f"{model}:{model}:ro" if model.is_dir() else f"{hub_cache()}:{HUB_CACHE}")
    environment = {
        name: text if text is None else text.replace("$", "$$")  # null passes on the caller's
        for name, text in _variables(spec, engine, INSIDE_CONTAINER).items()
    }
    environment |= {HOSTS_VARIABLE: address.hostname or "", KEY_VARIABLE: GIVEN_KEY}
    service = {
        "image": engine.image,
        "ipc": "host",
        "init": True,
        "entrypoint": ["python3", "-m", MODULE],
        "command": server_arguments(spec, engine, "0.0.0.0", port),
        "environment": environment,
        "ports": [f"{address.hostname}:{port}:{port}"],
        "volumes": volumes,
    }
    if spec.build == "cuda":
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    return service
