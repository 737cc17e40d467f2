"""An opponent in games with earlier weights: a checkpoint of this run or of another one.

It is a model of the policy's architecture with the checkpoint's weights, or the policy's model with
the checkpoint's adapter.
"""

from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.load import load_tokenizer
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.safetensors_only import ADAPTER_CONFIG
from openenv_pipe.models.teacher import model_there, reject_another_vocabulary
from openenv_pipe.runs.checkpoints import DIGESTS, find_damage
from openenv_pipe.runs.folder import RunFolder

KEY = "eval.opponent"


def find_opponent(config: RunConfig) -> Path | None:
    """Return the checkpoint that `eval.opponent` names; None if it names none.

    Raises ConfigError if there is no such checkpoint.
    """
    named = config.eval.opponent
    if named is None or named in config.env.baselines:
        return None
    folder = Path(named).expanduser().resolve()  # `best` is a link
    if not (folder / DIGESTS).is_file():
        raise ConfigError(
            f"{KEY}={named!r} is no folder of a checkpoint, and no policy of env.baselines "
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
    """Check that the checkpoint can be read; return what `check` reports. Raises ConfigError."""
    if (folder := find_opponent(config)) is None:
        return ""
    if (damage := find_damage(folder)) is not None:
        raise ConfigError(f"{KEY}={config.eval.opponent!r} is damaged: {damage}; name another one")
    return f"evaluations are played against {opponent_label(config)}"


def load_opponents(config: RunConfig, policy: Policy) -> dict[str, Policy]:
    """Load the checkpoints that the evaluations of all environments name, by these names.

    Raises:
        ConfigError: a checkpoint is damaged, or not of the policy's architecture and vocabulary.
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
        if (folder / ADAPTER_CONFIG).exists() != bool(config.model.lora.rank):
            raise ConfigError(f"model.lora.rank={config.model.lora.rank} is not the checkpoint's")
        opponent.load_model(folder)
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{given} is not of the policy's architecture, or has not its adapter "
            f"({config.model.label}): {error}; name a checkpoint of a run with the same model"
        ) from error
    return opponent
