"""The model that `env inspect` writes an experiment for: `tiny`, or what overrides name."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openenv_pipe.config.compose import (
    NO_EXPERIMENT,
    assign,
    block_of,
    compose,
    parse_overrides,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.architecture_check import find_max_length
from openenv_pipe.models.hub import is_on_this_machine, provide_model
from openenv_pipe.models.load import build_empty, load_chat
from openenv_pipe.models.tiny import build_tokenizer

TINY = "tiny"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model as `model=` names it, and how it counts and reads a conversation."""

    choice: str  # of the group `model`
    keys: Mapping[str, Any]  # of the block `model`, as overrides set them
    chat: ChatFormat
    max_length: int | None  # in tokens; None: it is fitted to the episodes, or is not known
    reads: bool  # prompts and examples mean something to it


def tiny_model() -> TrainedModel:
    """Return the model of experiments that name none."""
    return TrainedModel(
        choice=TINY,
        keys={},
        chat=ChatFormat(build_tokenizer()),
        max_length=None,
        reads=False,
    )


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the block `model`, and the others. Raises ConfigError."""
    of_model, others = list[str](), list[str]()
    for line, override in zip(overrides, parse_overrides(overrides), strict=True):
        (of_model if block_of(override) == "model" else others).append(line)
    return of_model, others


def find_model(overrides: Sequence[str], notify: Callable[[str], None]) -> TrainedModel:
    """Find the model of the overrides, and get its files if only this program can get them.

    Raises ConfigError: there is no such model, it has no chat template, or it cannot be trained.
    """
    if not overrides:
        return tiny_model()
    config = compose([NO_EXPERIMENT, "name=inspect", *overrides]).config.model
    choice, keys = TINY, dict[str, Any]()
    for override in parse_overrides(overrides):
        if override.key_or_group == "model":
            if not isinstance(named := override.value(), str):
                raise ConfigError(
                    f"model={named!r}: expected the name of a model's preset; give its keys one "
                    "by one, as in model=hub model.path=..."
                )
            choice = named
        else:
            assign(keys, override.key_or_group.removeprefix("model."), override.value())
    asyncio.run(provide_model(config, notify))
    reads = config.type != TINY
    is_measured = reads and is_on_this_machine(config)
    return TrainedModel(
        choice=choice,
        keys=keys,
        chat=load_chat(config),
        max_length=find_max_length(build_empty(config)) if is_measured else None,
        reads=reads,
    )
