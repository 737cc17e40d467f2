"""Checkpoints, of this run or of another one, as opponents in the games of evaluations.

An opponent is a model of the policy's architecture with the checkpoint's weights, or the policy's
model with the checkpoint's adapter.
"""

import json
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import HubModelConfig, ModelConfig, RunConfig
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.hub import model_source
from openenv_pipe.models.load import load_tokenizer
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.safetensors_only import ADAPTER_CONFIG
from openenv_pipe.models.teacher import model_there, reject_another_vocabulary
from openenv_pipe.runs.checkpoints import DIGESTS, find_damage
from openenv_pipe.runs.folder import RunFolder

KEY = "eval.opponent"
# Keys of `model` that say nothing about the weights of a base model.
COMPUTED = {"lora", "dtype", "autocast", "activation_checkpointing", "max_length"}
SHOWN = {"chat_template", "chat_template_kwargs", "template_time", "history"}


def find_opponent(config: RunConfig) -> Path | None:
    """Return the checkpoint that `eval.opponent` names; None if it names none.

    Raises ConfigError if there is no such checkpoint.
    """
    named = config.opponent_checkpoint
    if named is None:
        return None
    folder = Path(named)
    if not (folder / DIGESTS).is_file():
        raise ConfigError(
            f"{KEY}={named!r} is neither the folder of a checkpoint nor a policy of env.baselines "
            f"({', '.join(config.env.baselines)}); name one of these, or a folder such as "
            "RUN/checkpoints/step_000100"
        )
    return folder


def opponent_label(config: RunConfig) -> str | None:
    """Return how reports name `eval.opponent`: a checkpoint by its run and step."""
    if (folder := find_opponent(config)) is None:
        return config.eval.opponent
    try:
        return f"{RunFolder.open(folder.parent.parent).record.id}@{folder.name}"
    except RunFolderError:  # It was copied out of its run's folder.
        return str(folder)


def check_opponent(config: RunConfig) -> str:
    """Check that the checkpoint can be read, and that its adapter fits the policy's base model.

    Returns what `check` reports. Raises ConfigError.
    """
    if (folder := find_opponent(config)) is None:
        return ""
    if (damage := find_damage(folder)) is not None:
        raise ConfigError(f"{KEY}={config.eval.opponent!r} is damaged: {damage}; name another one")
    _reject_another_adapter(config, folder)
    return f"evaluations are played against {opponent_label(config)}"


def load_opponents(config: RunConfig, policy: Policy) -> dict[str, Policy]:
    """Load the checkpoints that the evaluations of all environments name, by these names.

    Raises ConfigError: a checkpoint is damaged, or not of the policy's architecture and vocabulary.
    """
    found: dict[str, Policy] = {}
    for each in config.environments.values():
        named, folder = each.eval.opponent, find_opponent(each)
        if folder is not None and named is not None and named not in found:
            check_opponent(each)
            found[named] = _load(config, folder, policy, named)
    return found


def _load(config: RunConfig, folder: Path, policy: Policy, named: str) -> Policy:
    given = f"{KEY}={named!r}"
    theirs = load_tokenizer(model_there(config.model, str(folder)))
    reject_another_vocabulary(policy.tokenizer, theirs, given)
    opponent = policy.twin()
    try:
        opponent.load_model(folder)
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{given} is not of the policy's architecture ({config.model.label}): {error}; name a "
            "checkpoint of a run with the same model"
        ) from error
    return opponent


def _reject_another_adapter(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if the checkpoint's adapter has other settings or another base model.

    Its tensors may fit nonetheless. The settings are read from the checkpoint's run or, if it was
    copied out of its run's folder, from the adapter's own file, which has fewer.
    """
    ours: dict[str, Any] = {"lora.rank": config.model.lora.rank}
    theirs: dict[str, Any] = {"lora.rank": 0}
    if (folder / ADAPTER_CONFIG).exists():
        try:
            model = RunFolder.open(folder.parent.parent).written_config.model
        except RunFolderError:
            written = json.loads((folder / ADAPTER_CONFIG).read_text())
            theirs = {"lora.rank": written["r"], "lora.alpha": written["lora_alpha"]}
            ours["lora.alpha"] = config.model.lora.alpha
            if isinstance(config.model, HubModelConfig):
                theirs["path"] = _whole_path(written["base_model_name_or_path"])
                ours["path"] = _whole_path(model_source(config.model))
        else:
            theirs, ours = _adapter_settings(model), _adapter_settings(config.model)
    for key, value in theirs.items():
        if ours.get(key) != value:
            raise ConfigError(
                f"{KEY}={config.eval.opponent!r} was trained with model.{key}={value!r}, and the "
                f"policy has {ours.get(key)!r}; name a checkpoint of a run with the same model"
            )


def _adapter_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that an adapter's weights are made for, by key."""
    lora = model.lora
    targets = lora.target_modules
    found = {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.target_modules": targets if isinstance(targets, str) else sorted(targets),
        **model.model_dump(exclude=COMPUTED | SHOWN),
    }
    return found | {"path": _whole_path(model.path)} if isinstance(model, HubModelConfig) else found


def _whole_path(path: str) -> str:
    """Return the real path of a model's folder; an id on a hub as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.exists() else path
