"""Restore, in a saved configuration, the secrets that a command uses."""

from collections.abc import Collection
from typing import Any

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import restore_in_config


def restore_used(config: RunConfig, blocks: Collection[str] | None) -> dict[str, Any]:
    """Return the values of a configuration whose secrets are hidden, with the used ones restored.

    Others keep their marks, also those of a judge that no term of the reward asks.

    blocks: those whose secrets are used; None: all.

    Raises RunFolderError if a secret is not in the environment.
    """
    values = config.model_dump(mode="json")
    judges = {
        name: (values["beside"][name] if name else values).pop("judge")
        for name, each in config.environments.items()
        if not each.reward.judged
    }
    used = {name: value for name, value in values.items() if blocks is None or name in blocks}
    values |= restore_in_config(used)
    for name, judge in judges.items():
        block = values["beside"][name] if name else values
        block["judge"] = restore_in_config(judge, needs_all=False)
    return values
