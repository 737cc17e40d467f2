"""The requirements of a run that can be checked without starting servers or loading weights.

`train` stops at the first requirement that is not met, before it makes a run folder, and
`openenv-pipe check` reports all of them. What needs only the configuration is a rule of
`config/rules/`; what has to be tried on this machine is here.
"""

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from openenv_pipe.algorithms.custom_advantages import UserAdvantages
from openenv_pipe.config.error_messages import list_problems
from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.rules import BrokenRulesError, Moment, check_rules
from openenv_pipe.config.schema import (
    HubModelConfig,
    PythonAdvantageConfig,
    PythonLossConfig,
    PythonOrderConfig,
    RunConfig,
    VllmEngineConfig,
)
from openenv_pipe.engines.scripted import replies_of
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.build import check_host
from openenv_pipe.environments.tasks import TaskOrder, known_splits
from openenv_pipe.environments.tasks.sets import ListedRows, SelectedTasks
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.devices import reject_missing_devices, several_devices
from openenv_pipe.learner.objective import Objective
from openenv_pipe.models.adapter import adapts_experts, describe_adapter, is_mixture
from openenv_pipe.models.forward.architecture_check import find_decoder
from openenv_pipe.models.forward.router_balance import reject_without_routers
from openenv_pipe.models.hub import find_model_folder, is_on_this_machine
from openenv_pipe.models.load import check_architecture, load_chat, reject_rerendered, select_device
from openenv_pipe.models.memory_estimate import BYTES, read_folder_shape, tiny_shape
from openenv_pipe.models.quantization import load_bitsandbytes
from openenv_pipe.pipeline.opponents import check_opponent
from openenv_pipe.pipeline.served_teacher import check_teachers
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards import Scorer
from openenv_pipe.runs.allocation import check_writable
from openenv_pipe.system.child_environment import given_variables
from openenv_pipe.system.process import port_in_use
from openenv_pipe.system.python_targets import check_part
from openenv_pipe.system.resources import load_callable
from openenv_pipe.trackers.build import check_tracker

# Returns what `check` reports; an empty text if it reports nothing. Raises ConfigError if the
# requirement is not met.
Requirement = Callable[[RunConfig], str]
RUN_FOLDER = "run folder"
PORTS = "ports"
WARM_START = "warm start"
MAX_PORT = 65535
OTHER_FILES = 200  # open files of this process beside the sockets of sessions


def check_requirements(
    config: RunConfig, *, plays: bool = True, makes_folder: bool = True, begins: bool = True
) -> None:
    """Check the requirements of a run, in order.

    plays: False for a run that trains on recorded episodes: only those of the learner.
    makes_folder: False for a run whose folder exists; a sweep may have started its servers.
    begins: False for a run that goes on from a checkpoint, after its warm start's data was read.

    Raises ConfigError: a requirement is not met.
    """
    skipped = [] if makes_folder else [RUN_FOLDER, PORTS]
    skipped += [] if begins else [WARM_START]
    for name, check in (REQUIREMENTS if plays else LEARNER_REQUIREMENTS).items():
        if name not in skipped:
            check(config)


def check_evaluation(config: RunConfig, *, makes_folder: bool) -> None:
    """Check the requirements of an evaluation, which needs no learner.

    makes_folder: True for a model that no run has trained.

    Raises ConfigError: a requirement is not met.
    """
    check_settings(config, "play", "eval")
    for name in EVALUATION_REQUIREMENTS:
        if makes_folder or name != RUN_FOLDER:
            REQUIREMENTS[name](config)


def check_settings(config: RunConfig, *moments: Moment) -> str:
    """Check that settings go together, before training or an evaluation. Raises ConfigError."""
    try:
        rules = check_rules(config, "always", *moments)
    except BrokenRulesError as error:
        raise ConfigError(list_problems(error.messages)) from None
    counts = Counter(rule.block for rule in rules)
    listed = ", ".join(f"{counts[block]} of {block}" for block in sorted(counts))
    return f"{len(rules)} rules between keys hold: {listed}"


def _sharding(config: RunConfig) -> str:
    return str(several_devices(config).check(config)) if config.trainer.devices > 1 else ""


def _device(config: RunConfig) -> str:
    device = select_device(config.device)
    reject_missing_devices(config.ranks_per_node, device)
    return f"{config.trainer.devices} x {device}" if config.trainer.devices > 1 else str(device)


def _folder(config: RunConfig) -> str:
    check_writable(config)
    return f"{config.runs_dir}/{config.name} can be written"


def _tracker(config: RunConfig) -> str:
    for name, tracker in config.tracker.items():
        check_tracker(name, tracker)
    return ""  # `check` builds the trackers as well, and reports that


def _advantage(config: RunConfig) -> str:
    advantage = config.trainer.advantage
    if not isinstance(advantage, PythonAdvantageConfig):
        return ""
    UserAdvantages(advantage)
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
        num_parameters = tiny_shape(model).num_parameters
        if num_parameters * BYTES[model.dtype] > psutil.virtual_memory().total:
            raise ConfigError(
                f"model=tiny has {num_parameters / 1e9:.0f} billion parameters, whose weights do "
                "not fit into this machine's memory; lower model.hidden_size or model.num_layers"
            )
        empty = check_architecture(config)
        text = f"built from the seed, {num_parameters / 1e6:.2f} million parameters"
        return f"{text}; {describe_adapter(empty)}" if model.lora.rank else text
    folder = find_model_folder(model)
    if folder is None:
        return ""  # it has to be downloaded first
    shape = read_folder_shape(model, folder)
    empty = check_architecture(config)
    _reject_unread_adapter(config, empty)
    _reject_lost_weights(config, empty)
    base = empty.get_base_model() if model.lora.rank else empty
    reject_without_routers(find_decoder(base), config.trainer.loss.router_aux_coef)
    where = "folder" if Path(model.path).expanduser().is_dir() else "cache"
    size = f", {shape.num_parameters / 1e9:.2f} billion parameters" if shape else ""
    text = f"{model.path} ({where}){size}"
    return f"{text}; {describe_adapter(empty)}" if model.lora.rank else text


def _reject_unread_adapter(config: RunConfig, model: Any) -> None:
    """Raise ConfigError if the adapter is published to servers that do not support it."""
    engine = config.engine
    if publish_mode(config) != "adapter":
        return
    if adapts_experts(model):
        raise ConfigError(
            "engine.publish=adapter with model.lora.target_modules="
            f"{config.model.lora.target_modules!r}, which adapts the experts of a mixture: vLLM "
            "does not read such adapters; set engine.publish=merged, or name other modules, such "
            "as [q_proj, k_proj, v_proj, o_proj]"
        )
    if engine.starts_servers and is_mixture(model) and select_device(config.device).type == "cpu":
        raise ConfigError(
            "engine.publish=adapter with a mixture of experts on a CPU: vLLM's CPU build computes "
            "no experts in a server that takes adapters; set engine.publish=merged"
        )


def _reject_lost_weights(config: RunConfig, model: Any) -> None:
    """Raise ConfigError if the weight transfer to the servers would lose some weights.

    vLLM's own transfers between GPUs bypass `openenv_pipe_reload`, which updates all of GPT-OSS.
    """
    engine = config.engine
    if (
        isinstance(engine, VllmEngineConfig)
        and publish_mode(config) != "adapter"
        and engine.weight_transfer != "files"
        and model.config.model_type == "gpt_oss"
        and select_device(config.device).type == "cuda"
    ):
        raise ConfigError(
            f"engine.weight_transfer={engine.weight_transfer} with GPT-OSS: vLLM would keep the "
            "experts and sinks that it has; set engine.weight_transfer=files"
        )


def _chat(config: RunConfig) -> str:
    if not is_on_this_machine(config.model):
        return ""
    chat = load_chat(config.model)
    reject_rerendered(config, chat)
    if chat.history == "rerender":
        return "the template renders each prompt anew"
    return "the template keeps earlier turns as they were written"


def _by_type(block: str) -> Requirement:
    """Return the requirement of a block: the `check` of the block's type, if it has one.

    That is called with the block's configuration (for an engine, with the run's), and returns what
    `openenv-pipe check` reports, if anything. Raises ConfigError.
    """

    def checked(config: RunConfig) -> str:
        own = getattr(config, block)
        check = block_types(block)[own.type].check
        return load(check)(config if block == "engine" else own) or "" if check else ""

    return checked


def _environment(config: RunConfig) -> str:
    """Check the host, and that this process may open a socket for each session."""
    host = config.host
    needed = config.capacity + OTHER_FILES
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ConfigError(
            f"host.sessions_per_server={host.sessions_per_server}, {config.capacity} in all, needs "
            f"about {needed} open files, and this process may have {allowed}; lower it, or raise "
            f"the limit with `ulimit -n {needed}`"
        )
    return check_host(config)


def _ports(config: RunConfig) -> str:
    """Check that the fixed ports of servers that the run starts are free, and differ."""
    fixed = [port for each in config.environments.values() for port in each.host.fixed_ports]
    if twice := {port for port in fixed if fixed.count(port) > 1}:
        raise ConfigError(
            f"several environments have the port {min(twice)}; set host.port and "
            "beside.NAME.host.port so that each has its own, or null to let free ports be picked"
        )
    wanted = {"host.port": config.host.fixed_ports}
    if not config.cluster.serves_on_nodes:
        wanted["engine.port"] = config.engine.fixed_ports
    wanted = {key: ports for key, ports in wanted.items() if ports}
    for key, ports in wanted.items():
        if ports[-1] > MAX_PORT:
            raise ConfigError(
                f"{key}={ports[0]} for {len(ports)} servers goes beyond the last port, {MAX_PORT}; "
                "set a lower one, or null to let free ports be picked"
            )
        for port in ports:
            if port_in_use(port):
                raise ConfigError(
                    f"{key}={ports[0]}: port {port} is used by another program; set another "
                    "number, or null to let free ports be picked"
                )
    return ", ".join(f"{key}={ports[0]} is free" for key, ports in wanted.items())


def _adapter(config: RunConfig) -> str:
    adapter = build_adapter(config.env.adapter)
    if config.env.adapter.type != "python":
        adapter.reject("an example")  # renders the template `unusable`, which needs no observation
    return f"{config.env.adapter.type}: templates and pattern are valid"


def _tasks(config: RunConfig) -> str:
    if isinstance(config.env.tasks.order, PythonOrderConfig):
        check_part("env.tasks.order", config.env.tasks.order, TaskOrder, 2)
    shown = []
    for tasks in known_splits(config).values():
        if isinstance(tasks, ListedRows | SelectedTasks):
            keywords = tasks[0].reset.items()  # All rows of a CSV file have the same types.
            types = ", ".join(f"{name} ({type(value).__name__})" for name, value in keywords)
            shown.append(f"{tasks.source}: {types}")
    return "; ".join(dict.fromkeys(shown))  # Both splits may be shares of one file.


def _rewards(config: RunConfig) -> str:
    Scorer(config.reward, config.env.success_reward)
    terms = [f"{term.weight:g} × {name}" for name, term in config.reward.terms.items()]
    return f"terms: {', '.join(terms)}"


def _policies(config: RunConfig) -> str:
    """Check the scripted policies of the warm start and of the baselines."""
    targets = list(config.env.baselines.values()) if config.eval.baselines else []
    warm_start = config.trainer.warm_start
    if (policy := warm_start.source.scripted_policy) and warm_start.steps:
        targets.insert(0, policy)
    for target in targets:
        replies_of(load_callable(target))
    return ", ".join(dict.fromkeys(targets))


def _warm_start(config: RunConfig) -> str:
    """Check the data that the warm start imitates, if its source reads data."""
    warm_start = config.trainer.warm_start
    check = block_types("trainer.warm_start.source")[warm_start.source.type].check
    return load(check)(warm_start.source) or "" if check and warm_start.steps else ""


def _variables(config: RunConfig) -> str:
    """Check that this process has the environment variables that it is to pass on."""
    for key in ("env", "agent", "engine", "judge"):
        given_variables(getattr(getattr(config, key), "variables", {}), f"{key}.variables")
    return ""


def _of_each(check: Requirement) -> Requirement:
    """Return a requirement that checks every environment of a run."""

    def checked(config: RunConfig) -> str:
        found = [check(config)]
        for name, each in config.environments.items():
            try:
                found += [f"{name}: {text}"] if name and (text := check(each)) else []
            except ConfigError as error:
                raise ConfigError(f"beside.{name}: {error}") from error
        return "; ".join(filter(None, found))

    return checked


LEARNER_REQUIREMENTS: dict[str, Requirement] = {
    "settings": lambda config: check_settings(config, "train"),
    "device": _device,
    "sharding": _sharding,
    RUN_FOLDER: _folder,
    "tracker": _tracker,
    "advantage": _advantage,
    "loss": _loss,
    "packages": _packages,
    "model": _model,
    "chat": _chat,
    "teacher": check_teachers,
}
REQUIREMENTS: dict[str, Requirement] = LEARNER_REQUIREMENTS | {
    "settings": lambda config: check_settings(config, "train", "play"),
    "advantage": _of_each(_advantage),
    "variables": _of_each(_variables),
    "engine": _by_type("engine"),
    "judge": _of_each(_by_type("judge")),
    PORTS: _of_each(_ports),
    "cluster": _by_type("cluster"),
    "environment": _of_each(_environment),
    "adapter": _of_each(_adapter),
    "tasks": _of_each(_tasks),
    "rewards": _of_each(_rewards),
    "policies": _of_each(_policies),
    WARM_START: _warm_start,
    "opponent": _of_each(check_opponent),
    "agent": _by_type("agent"),
}
EVALUATION_REQUIREMENTS = (
    *(RUN_FOLDER, "packages", "variables", "engine", "judge", "environment", "adapter", "tasks"),
    *("rewards", "policies", "opponent", "agent"),
)
