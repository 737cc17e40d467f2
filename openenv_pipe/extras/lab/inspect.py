"""`openenv-pipe env inspect`: write a block and an experiment that train on an environment.

The published schemas decide the adapter: MCP tools take `tool`, an action of one text takes `text`,
any other `json`. Random actions are played to measure limits, rewards and sessions. What a success
is, and what else a model should be told, is not published; such values are marked as guesses.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.config.compose import compose, compose_env
from openenv_pipe.config.render import to_yaml
from openenv_pipe.config.schema import EnvConfig, ServingConfig, TaskRange
from openenv_pipe.config.secrets import hide_in_config, known_secrets
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.environments.client.metadata import ServerMetadata, fetch_metadata
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.chat_prompts import ChatPrompts, adapter_block, is_description
from openenv_pipe.extras.lab.check.other_paths import describe_unknown_paths
from openenv_pipe.extras.lab.experiment import (
    TINY,
    TrainedModel,
    ends_notes,
    experiment,
    find_model,
    fit_limits,
    fit_memory,
    for_model,
)
from openenv_pipe.extras.lab.server_splits import are_seeds_alone, describe_splits, split_keys
from openenv_pipe.extras.lab.targets import NO_BLOCK, Target, one_server, open_tasks
from openenv_pipe.extras.lab.templates import plain
from openenv_pipe.extras.lab.trial import NUM_SESSIONS, Trial, notes_of, problem_of, try_environment
from openenv_pipe.pipeline.requirements import check_requirements
from openenv_pipe.system.resources import env_dirs, find_env, short_path
from openenv_pipe.system.secrets import MARK

_log = logging.getLogger(__name__)

START_KEYS = (
    *("package", "python", "command", "variables"),
    *("reset_timeout_s", "step_timeout_s", "max_message_mb"),
)
ONE_SESSION = (
    "A server has one session. Several servers play episodes at the same time:\n"
    "host.sessions_per_server=1 host.num_servers=4"
)
MAX_NAME = 60  # characters
WIDTH = 100  # columns of the files that are written
FOR_TINY = "Limits in tokens of the model `tiny`, which are bytes, and how random weights learn."
NO_GOAL = (
    "nothing in the prompt says what the goal is, because the environment's metadata has no "
    "description: write it into env.adapter.system, or return it from get_metadata"
)
CAN_IT_ACT = (
    "nobody has tried whether the model writes usable replies here: `openenv-pipe eval conf={name} "
    "eval.num_tasks=4` shows it before you train; if they are unusable, let it imitate episodes "
    "first (trainer.warm_start, as conf/conf/email_search/smollm2_135m.yaml does)"
)
KEPT_PROMPTS = (
    "{path} is kept with its prompts, which are not those that are written for model={model}; "
    "without -o, they are printed"
)
GUESSED_TASKS = (
    "a guess: task i is reset with seed seed_start + i; eval tasks may be training tasks"
)
UNTRAINABLE = "NO MODEL CAN BE TRAINED WITH THIS BLOCK"  # begins its first line
# Only for actions with a schema; for plain text there is nothing to draw from.
BASELINES = "baselines: {random: openenv_pipe.environments.random_policy:random_action}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    name: str  # of the block and of the experiment
    block: str  # conf/env/<name>.yaml
    experiment: str | None = None  # conf/conf/<name>.yaml; None: there is a problem
    model: str  # the choice of the group
    for_model: str | None = None  # conf/conf/<name>/<model>.yaml: what only this model needs
    notes: Sequence[str]  # what the user should know of the environment
    written: Sequence[Path] = ()  # the files; empty without an output
    problem: str | None = None  # why a model cannot be trained on it; None: it can


def inspect_environment(
    target: Target,
    output: Path | None,
    notify: Callable[[str], None] = _log.info,
    model_overrides: Sequence[str] = (),
) -> Inspection:
    """Play an environment, and return its block and its experiment as YAML.

    A block with which no model can be trained says so in its first line, and has no experiment.

    output: conf/env/NAME.yaml, where the block is written; the experiment becomes
    conf/conf/NAME.yaml beside it, and conf/conf/NAME/MODEL.yaml. None: nothing is written. If block
    and experiment exist, they are kept, and only the file of another model is written.
    model_overrides: of the block `model`; without any, the experiment is for random weights.

    Raises ConfigError, HostError and FailureError.
    """
    model = find_model(model_overrides, notify)
    paths = [] if output is None else [output, *_beside(output, model.choice)]
    existing = [path for path in paths if path.exists()]
    kept = output if existing and existing == paths[:2] else None
    if existing and kept is None:
        raise ConfigError(f"{existing[-1]} exists; name another file or model, or remove it")
    seen = asyncio.run(_ask(target.serving, model, notify))
    found = _inspect(target.serving, model, seen, output.stem if output else None, kept)
    texts = (found.block, found.experiment, found.for_model)
    written = {
        path: text
        for path, text in zip(paths, texts, strict=False)
        if text is not None and path not in existing
    }
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return replace(found, written=list(written))


def _beside(output: Path, model: str) -> list[Path]:
    """Return the experiment's files beside that of a block. Raises ConfigError."""
    if output.parent.name != "env" or output.suffix != ".yaml":
        raise ConfigError(
            f"--output {output}: expected a file conf/env/NAME.yaml, because blocks are looked for "
            "in conf/env; the experiment is written beside it, as conf/conf/NAME.yaml"
        )
    experiments = output.parent.parent / "conf"
    return [experiments / output.name, experiments / output.stem / f"{model}.yaml"]


def _inspect(
    serving: ServingConfig, model: TrainedModel, seen: "_Seen", name: str | None, kept: Path | None
) -> Inspection:
    """kept: the existing block, whose experiment gets a file for the model."""
    description, trial = seen.description, seen.trial
    serving = serving.model_copy(update={"env": seen.env})
    problem = problem_of(trial, serving.env, description.action)
    comments = [_where(serving), ONE_SESSION if trial.num_sessions == 1 else ""]
    block = env_block(description, serving.env, trial, comments, seen.prompts)
    name = name or yaml.safe_load(block)["name"]
    notes = list(notes_of(trial, serving.env))
    if problem is not None:
        return Inspection(
            name=name,
            block=f"{_comment(f'{UNTRAINABLE}: {problem}')}{block}",
            model=model.choice,
            notes=[*notes, *seen.notes],
            problem=problem,
        )
    fresh = yaml.safe_load(block).get("adapter")
    block = block if kept is None else kept.read_text()
    with _conf_with(name, block, kept) as folder:
        conf = folder / "conf"
        with contextlib.chdir(folder):
            env = compose_env([f"env={name}"]).env
        if yaml.safe_load(block).get("adapter") != fresh:
            notes.append(KEPT_PROMPTS.format(path=kept, model=model.choice))
        adapter = build_adapter(env.adapter, description.action)
        fitting = serving.model_copy(update={"env": env})
        limits = asyncio.run(fit_limits(env, adapter, trial, model))
        keys = experiment(name, fitting, trial, limits)
        text = _experiment_text(name, serving.host.type, model.choice, keys)
        if kept is not None:
            text = (conf / "conf" / f"{name}.yaml").read_text()
        own_keys = for_model(fitting, trial, limits, model)
        own = _model_text(model.choice, own_keys)
        (conf / "conf" / f"{name}.yaml").write_text(text)
        (conf / "conf" / name / f"{model.choice}.yaml").write_text(own)
        with contextlib.chdir(folder):
            config = compose([f"conf={name}", f"model={model.choice}"]).config
    check_requirements(config, makes_folder=False)
    if model.reads:
        own = _model_text(model.choice, own_keys | fit_memory(config))
    notes += [*ends_notes(trial, config.env), *_prompt_notes(seen, config.env, name)]
    return Inspection(
        name=name,
        block=block,
        experiment=text,
        model=model.choice,
        for_model=own,
        notes=[*notes, *seen.notes],
    )


def _prompt_notes(seen: "_Seen", env: EnvConfig, name: str) -> Iterator[str]:
    """Say what is not known of prompts for a model that understands language."""
    if seen.prompts is None:
        return
    yield from seen.prompts.notes(env.adapter.type)
    if not is_description(seen.description.text):
        yield NO_GOAL
    if env.adapter.type != "text":
        yield CAN_IT_ACT.format(name=name)


@contextlib.contextmanager
def _conf_with(name: str, block: str, kept: Path | None) -> Iterator[Path]:
    """Yield a temporary folder whose `conf` has the block, and models of the current folder.

    kept: an existing block; all of the `conf` that it is in is copied.
    """
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-inspect-") as folder:
        conf = Path(folder) / "conf"
        if kept is not None:
            shutil.copytree(kept.absolute().parent.parent, conf)
        for group in ("env", f"conf/{name}"):
            (conf / group).mkdir(parents=True, exist_ok=True)
        (conf / "env" / f"{name}.yaml").write_text(block)
        if (own_models := Path("conf/model")).is_dir() and not (conf / "model").exists():
            (conf / "model").symlink_to(own_models.resolve())
        yield Path(folder)


def _experiment_text(name: str, host: str, model: str, keys: dict[str, Any]) -> str:
    choices = {"env": name, "reward": "usable"}
    choices |= {"host": host} if host != "process" else {}
    choices |= {"model": model} if model != TINY else {}
    listed = "".join(f"  - override /{group}: {choice}\n" for group, choice in choices.items())
    return (
        "# @package _global_\n"
        f"# Written by `openenv-pipe env inspect`, for any model. What only the model `{model}` "
        f"needs\n# is in {name}/{model}.yaml.\n"
        f"defaults:\n{listed}  - _self_\n\n{to_yaml(keys, WIDTH)}"
    )


def _model_text(model: str, keys: dict[str, Any]) -> str:
    about = FOR_TINY if model == TINY else f"Limits in tokens of the model `{model}`."
    return f"# @package _global_\n# {about}\n{to_yaml(keys, WIDTH)}"


def env_block(
    description: ServerMetadata,
    env: EnvConfig,
    trial: Trial | None = None,
    notes: Sequence[str] = (),
    prompts: ChatPrompts | None = None,
) -> str:
    """Return a file for `conf/env/` with a comment on each guessed value.

    The keys that start the server are taken from `env`; secrets become references to environment
    variables.

    prompts: for a model that understands language; None: for random weights.
    """
    kind, adapter = adapter_block(description, trial, prompts)
    override = "" if kind == "text" else f"  - override adapter: {kind}\n"
    form = schema_text(without_metadata(description.action))
    parts = [description.text, f"Its action:\n{form}" if kind != "tool" else "", *notes]
    about = "\n".join(filter(None, parts))
    name = Path(env.package).name if env.package else description.name or env.name
    head = {"name": re.sub(r"\W+", "_", name).lower()[:MAX_NAME], **_start_of(env)}
    return (
        f"{_comment(about)}defaults:\n  - base\n{override}  - _self_\n\n"
        f"{to_yaml(head, WIDTH)}"
        f"{_step_exception(env, trial)}"
        "success_reward: 1.0  # a guess: from this total on, an episode is a success\n"
        f"{BASELINES if kind != 'text' else ''}"
        f"{to_yaml({'adapter': adapter}, WIDTH) if adapter else ''}"
        f"{_tasks(env)}"
    )


def _step_exception(env: EnvConfig, trial: Trial | None) -> str:
    if trial is not None and trial.exceptions and trial.num_actions:
        return "step_exception: unusable  # an action that the schema allows raised\n"
    return "step_exception: unusable\n" if env.step_exception == "unusable" else ""


def _with_tasks(env: EnvConfig, keys: Mapping[str, Mapping[str, Any]]) -> EnvConfig:
    ranges = {
        split: getattr(env.tasks, split).model_copy(update=changes)
        for split, changes in keys.items()
    }
    return env.model_copy(update={"tasks": env.tasks.model_copy(update=ranges)})


def _tasks(env: EnvConfig) -> str:
    keys: dict[str, dict[str, Any]] = {}
    for split, size in {"train": 1000, "eval": 100}.items():
        tasks = getattr(env.tasks, split)
        keys[split] = {"num_tasks": size}
        if isinstance(tasks, TaskRange):
            keys[split] = tasks.model_dump(include={"num_tasks", "index_key", "reset"})
    lines = (
        f"  {split}: {_flow({name: value for name, value in values.items() if value})}\n"
        for split, values in keys.items()
    )
    comment = f"  # {GUESSED_TASKS}" if are_seeds_alone(env.tasks) else ""
    return f"tasks:{comment}\n{''.join(lines)}"


def _start_of(env: EnvConfig) -> dict[str, Any]:
    usual = compose_env([*NO_BLOCK, "env.name=usual"]).env
    values = env.model_dump(include=set(START_KEYS))
    if env.package:
        values["package"] = _short_package(env.package)
    changed = {key: values[key] for key in START_KEYS if values[key] != getattr(usual, key)}
    return _with_references(hide_in_config(changed, known_secrets(changed)))


def _with_references(value: Any) -> Any:
    """Replace secrets by references to environment variables of the same names."""
    if isinstance(value, dict):
        return {key: _with_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_references(item) for item in value]
    return MARK.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


def _where(serving: ServingConfig) -> str:
    """Name the host overrides that training needs, if the block does not start the server."""
    host = serving.host
    if not host.servers:
        return ""
    keys = [
        f"'host.{key}=[{','.join(value)}]'" if isinstance(value, list) else f"host.{key}={value}"
        for key, value in host.servers.items()
    ]
    purpose = "To start it" if host.starts_servers else "To use it where it runs"
    return f"{purpose}: host={host.type} {' '.join(keys)}"


def _short_package(package: str) -> str:
    folder = find_env(package)
    if any(folder.parent == each.resolve() for each in env_dirs()):
        return folder.name
    path = short_path(folder)
    return path if path.startswith("/") else f"./{path}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    env: EnvConfig  # with the tasks that were found
    description: ServerMetadata
    trial: Trial
    prompts: ChatPrompts | None  # None: the model reads none
    notes: Sequence[str]  # on what else the server offers, and what is not known of it


async def _ask(serving: ServingConfig, model: TrainedModel, notify: Callable[[str], None]) -> _Seen:
    """Fetch the metadata and play random actions, starting a server if none runs."""
    notify("starting the server")
    async with one_server(serving, num_sessions=NUM_SESSIONS) as host:
        url, access, env = host.urls[0], host.access, serving.env
        description = await fetch_metadata(url, access)
        if (keys := await split_keys(env, host)) is not None:
            env = _with_tasks(env, keys)
        told = [
            await describe_splits(env, host, are_taken=keys is not None),
            await describe_unknown_paths(url, access),
        ]
        tasks = await open_tasks(env, "train", host)
        trial = await try_environment(env, host, tasks, description.action, notify)
        prompts = None
        if model.reads:
            held_out = await open_tasks(env, "eval", host)
            takes_tools = model.chat.takes_tools
            prompts = ChatPrompts.of(
                trial, env, description.action, held_out, takes_tools=takes_tools
            )
        notes = [text for text in told if text is not None]
        return _Seen(env=env, description=description, trial=trial, prompts=prompts, notes=notes)


def _flow(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10**6).strip()


def _comment(text: str) -> str:
    """Return lines of comment. One that begins with `@` would be a directive to Hydra."""
    lines = re.sub(r"(?m)^[\s#]*@", "'@", plain(text).strip()).splitlines()
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
