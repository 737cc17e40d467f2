"""What a run needs, as far as it can be checked without starting servers or loading weights.

`train` refuses a run by the first requirement that is not met, before it makes a run folder.
`openenv-pipe check` reports all of them. A new refusal at the start of a run belongs here.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.config.schema import (
    HubModelConfig,
    ProcessHostConfig,
    PythonAdvantageConfig,
    PythonLossConfig,
    RunConfig,
    VllmEngineConfig,
)
from openenv_pipe.engines.scripted import replies_of
from openenv_pipe.engines.vllm.check import check_settings
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.hosts.process import find_program
from openenv_pipe.environments.tasks import known_splits
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.distributed.workers import refuse_missing_devices
from openenv_pipe.learner.objective import Objective
from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.models.load import (
    check_architecture,
    find_model_folder,
    load_tokenizer,
    select_device,
)
from openenv_pipe.models.memory_estimate import read_folder_shape, tiny_shape
from openenv_pipe.models.quantization import load_bitsandbytes
from openenv_pipe.rewards import Scorer
from openenv_pipe.runs.allocation import check_writable
from openenv_pipe.system.python_targets import bind_function
from openenv_pipe.system.resources import find_env, load_callable, short_path
from openenv_pipe.trackers import check_tracker

# Returns what was found, for `check`; an empty text where there is nothing to say. Raises
# ConfigError if the run would be refused.
Requirement = Callable[[RunConfig], str]
RUN_FOLDER = "run folder"


def check_requirements(config: RunConfig, *, plays: bool = True, makes_folder: bool = True) -> None:
    """Check the requirements of a run, in order.

    plays: False: only those of the learner, which trains on recorded episodes.
    makes_folder: False: the run has its folder, and `runs_dir` is not used.

    Raises:
        ConfigError: a requirement is not met.
    """
    for name, check in (REQUIREMENTS if plays else LEARNER_REQUIREMENTS).items():
        if makes_folder or name != RUN_FOLDER:
            check(config)


def _training(config: RunConfig) -> str:
    if not config.engine.capabilities.can_train:
        raise ConfigError(
            f"engine={config.engine.type} is for evaluation and cannot learn; train with "
            "engine=local or engine=vllm"
        )
    if config.engine.type == "vllm" and (distortions := config.engine.sampling.distortions):
        raise ConfigError(
            f"engine.sampling.{', engine.sampling.'.join(distortions)}: tokens would be drawn from "
            "another distribution than the one that is trained, and their logprobs would be of "
            "that one; for training leave them off, for evaluation they may be set"
        )
    if config.model.lora.rank == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "model.dtype=bfloat16 with model.lora.rank=0: most updates of full training would be "
            "rounded away; set model.dtype=float32 model.autocast=bfloat16, or a model.lora.rank"
        )
    return f"engine={config.engine.type} can train"


def _device(config: RunConfig) -> str:
    device = select_device(config.device)
    refuse_missing_devices(config.trainer.devices, device)
    return f"{config.trainer.devices} x {device}" if config.trainer.devices > 1 else str(device)


def _folder(config: RunConfig) -> str:
    check_writable(config)
    return f"{config.runs_dir}/{config.name} can be written"


def _tracker(config: RunConfig) -> str:
    check_tracker(config.tracker)
    return ""  # `check` builds it as well, and says so


def _advantage(config: RunConfig) -> str:
    advantage = config.trainer.advantage
    if not isinstance(advantage, PythonAdvantageConfig):
        return ""
    bind_function("trainer.advantage", advantage, 1)
    return advantage.target


def _loss(config: RunConfig) -> str:
    loss = config.trainer.loss
    if not isinstance(loss, PythonLossConfig):
        return ""
    Objective(loss)
    return loss.target


def _packages(config: RunConfig) -> str:
    """Check for bitsandbytes, which quantized weights and optimizers need."""
    optimizers = {"trainer.optimizer": config.trainer.optimizer}
    if config.trainer.warm_start.steps:
        optimizers["trainer.warm_start.optimizer"] = config.trainer.warm_start.optimizer
    settings = [f"{key}.type={o.type}" for key, o in optimizers.items() if o.type == "adamw_8bit"]
    if config.model.quantization != "none":
        settings.append(f"model.quantization={config.model.quantization}")
    if not settings:
        return ""
    load_bitsandbytes(settings[0])
    return f"bitsandbytes, for {' and '.join(settings)}"


def _model(config: RunConfig) -> str:
    model = config.model
    if not isinstance(model, HubModelConfig):
        check_architecture(config)
        num_parameters = tiny_shape(model).num_parameters
        return f"built from the seed, {num_parameters / 1e6:.2f} million parameters"
    folder = find_model_folder(model)
    if folder is None:
        return ""  # it has to be downloaded first
    shape = read_folder_shape(model, folder)
    check_architecture(config)
    where = "folder" if Path(model.path).expanduser().is_dir() else "cache"
    size = f", {shape.num_parameters / 1e9:.2f} billion parameters" if shape else ""
    return f"{model.path} ({where}){size}"


def _chat(config: RunConfig) -> str:
    model = config.model
    if isinstance(model, HubModelConfig) and find_model_folder(model) is None:
        return ""
    ChatFormat(load_tokenizer(model))
    return "the template keeps earlier turns as they were written"


def _engine(config: RunConfig) -> str:
    if isinstance(config.engine, VllmEngineConfig):
        check_settings(config.engine, config.model.lora.rank)
    return ""  # `check` looks at the installation or the server as well, and says what is there


def _environment(config: RunConfig) -> str:
    env, host = config.env, config.host
    if host.type == "python":
        load_callable(host.target)
        return f"by {host.target}"
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as logs:
        build_host(config, Path(logs))
    if host.type == "attach":
        return f"at {', '.join(host.urls)}"
    if image := getattr(host, "image", None):
        return f"image {image}"
    if isinstance(host, ProcessHostConfig) and env.command:
        return f"started by {find_program(env)}"
    return short_path(find_env(env.package)) if env.package else f"host.type={host.type}"


def _adapter(config: RunConfig) -> str:
    adapter = build_adapter(config.env.adapter)
    if config.env.adapter.type != "python":
        adapter.refuse("an example")  # renders the template `unusable`, which needs no observation
    return f"{config.env.adapter.type}: templates and pattern are valid"


def _tasks(config: RunConfig) -> str:
    known_splits(config)
    return ""  # `check` says how many there are, once it has asked the server


def _rewards(config: RunConfig) -> str:
    Scorer(config.reward, config.env.success_reward)
    return f"terms: {', '.join(config.reward.terms)}"


def _policies(config: RunConfig) -> str:
    """Check the scripted players: of the warm start, and the baselines."""
    dotted = list(config.env.baselines.values()) if config.eval.baselines else []
    if (policy := config.trainer.warm_start.policy) and config.trainer.warm_start.steps:
        dotted.insert(0, policy)
    for each in dotted:
        replies_of(load_callable(each))
    return ", ".join(dict.fromkeys(dotted))


LEARNER_REQUIREMENTS: dict[str, Requirement] = {
    "training": _training,
    "device": _device,
    RUN_FOLDER: _folder,
    "tracker": _tracker,
    "advantage": _advantage,
    "loss": _loss,
    "packages": _packages,
    "model": _model,
    "chat": _chat,
    "engine": _engine,
}
REQUIREMENTS: dict[str, Requirement] = LEARNER_REQUIREMENTS | {
    "environment": _environment,
    "adapter": _adapter,
    "tasks": _tasks,
    "rewards": _rewards,
    "policies": _policies,
}
