"""The command `models`: list the models that `model=` names, and get one onto this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from openenv_pipe.config.compose import NO_EXPERIMENT, load_values, readable_errors
from openenv_pipe.config.composed_files import open_loader
from openenv_pipe.config.overrides import override_with_text
from openenv_pipe.config.schema import HubModelConfig, ModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import (
    download_missing,
    find_made_model,
    find_model_folder,
    provide_model,
)
from openenv_pipe.system.resources import group_options
from openenv_pipe.system.tables import Column, Fit, Table


def models_table() -> Table:
    table = Table(Column("model="), Column("model.path"), Column("on this machine", fit=Fit.FOLD))
    for name in group_options("model"):
        try:
            model = _compose([f"model={name}"])
        except ConfigError as error:  # `hub` has no path
            table.add_row(name, "", str(error).partition("\n")[0])
            continue
        if isinstance(model, HubModelConfig):
            table.add_row(name, model.path, _where(model))
        else:
            table.add_row(name, "", "built from a seed")
    return table


def _where(model: HubModelConfig) -> str:
    if folder := find_model_folder(model):
        size_mb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
        return f"{folder} ({size_mb:,.0f} MB)"
    made = find_made_model(model)
    return "no" + (f"; without the hub, {made.about}" if made else "")


async def fetch_model(name: str, notify: Callable[[str], None]) -> Path | None:
    """Get a model onto this machine: an option of `model=`, an id on the hub, or a GGUF file.

    Returns its folder; None for a model that is built from a seed. Raises ConfigError.
    """
    is_option = name in group_options("model")
    by_path = ["model=hub", override_with_text("++model.path", name)]
    model = _compose([f"model={name}"] if is_option else by_path)
    await provide_model(model, notify)
    download_missing(model)
    return find_model_folder(model) if isinstance(model, HubModelConfig) else None


def _compose(overrides: list[str]) -> ModelConfig:
    with readable_errors():
        # Models interpolate `device` and `seed`.
        only = ("model", "device", "seed")
        values = load_values(open_loader(), [NO_EXPERIMENT, *overrides], only)
        adapter: TypeAdapter[Any] = TypeAdapter(ModelConfig)
        return adapter.validate_python(values["model"])
