"""A teacher: a model other than the policy, as the reference of the KL term.

It is frozen and reads the token ids of the policy, so its vocabulary has to be the policy's. Each
environment of a run may have its own.

Shape letters: U predicted tokens, R some of them, N trained tokens, H hidden size, V the policy's
vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.config.schema import HubModelConfig, ModelConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.hub import find_model_folder, is_on_this_machine
from openenv_pipe.models.load import load_policy, load_tokenizer
from openenv_pipe.models.memory_estimate import Shape, read_folder_shape
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.safetensors_only import reject_other_weights
from openenv_pipe.registry import if_command

ELEMENTS = 1 << 20  # logits of each model at a time, on a CPU
GPU_ELEMENTS = 1 << 25  # the same on a GPU, whose kernels have to be long: 128 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPlace:
    """A teacher that the configuration names, and what it teaches."""

    key: str  # that names it
    environments: tuple[str, ...]  # as in `RunConfig.environments`
    config: RunConfig  # that of the first of them alone
    max_tokens: int  # of their longest episode

    @property
    def reference(self) -> str:
        reference = self.config.trainer.loss.kl.reference
        assert reference is not None
        return reference

    @property
    def is_served(self) -> bool:
        return self.config.trainer.loss.kl.has_served_teacher

    @property
    def model(self) -> HubModelConfig:
        """The model block of a teacher that is not on a server."""
        return model_there(self.config.model, self.reference)


def find_teachers(config: RunConfig) -> list[TeacherPlace]:
    """Return the teachers of a run; none if the reference is the policy itself, or is not used."""
    by_reference: dict[str, list[str]] = {}
    for name, each in config.environments.items():
        kl = each.trainer.loss.kl
        if kl.reference is not None and kl.coef > 0:
            by_reference.setdefault(kl.reference, []).append(name)
    return [
        TeacherPlace(
            key=f"beside.{first}.teacher" if first else "trainer.loss.kl.reference",
            environments=(first, *others),
            config=config.environments[first],
            max_tokens=max(
                config.environments[name].env.max_episode_tokens for name in (first, *others)
            ),
        )
        for first, *others in by_reference.values()
    ]


def model_there(model: ModelConfig, path: str) -> HubModelConfig:
    """Return the block of a frozen model beside the policy's, from a folder or a hub.

    Its matrix products have the precision of the policy's.
    """
    return HubModelConfig(
        type="hub",
        path=path,
        revision=None,
        lora=model.lora.model_copy(update={"rank": 0}),
        quantization="none",
        dtype=model.autocast,
        autocast=model.autocast,
        activation_checkpointing=False,
        chat_template=model.chat_template,
        chat_template_kwargs={},
        template_time=None,
        history="auto",
    )


def find_teacher_shapes(config: RunConfig) -> list[Shape]:
    """Return the shapes of the teachers on this machine whose config.json has the usual keys.

    Raises ConfigError: one is not on this machine, or cannot be read.
    """
    places = [place for place in find_teachers(config) if not place.is_served]
    return [shape for place in places if (shape := _read_shape(place)) is not None]


def _read_shape(place: TeacherPlace) -> Shape | None:
    with _naming(place.key):
        return read_folder_shape(place.model, _find_folder(place.model))


def _find_folder(teacher: HubModelConfig) -> Path:
    """Return the teacher's folder, also if it is a link. Raises ConfigError."""
    if (folder := find_model_folder(teacher)) is None:
        command = f"`openenv-pipe models --fetch {teacher.path}`"
        raise ConfigError(
            f"model.path={teacher.path!r} is not on this machine; name a folder"
            + if_command("models", f", or get the model by {command}")
        )
    reject_other_weights(str(folder))
    return folder.resolve()


def check_teacher(place: TeacherPlace) -> str:
    """Check that a teacher is on this machine and has the policy's vocabulary.

    Returns what `check` reports of it.

    Raises ConfigError: it is not here, has another vocabulary, or cannot be read.
    """
    shape, policy = _read_shape(place), place.config.model
    size = "memory not estimated: its config.json has other keys"
    if shape is not None:
        size = f"{shape.num_parameters / 1e6:,.2f} million parameters"
    if not is_on_this_machine(policy):
        return f"{place.reference}, {size}; its vocabulary is compared after the policy's download"
    with _naming(place.key):
        theirs = load_tokenizer(place.model)
    reject_another_vocabulary(load_tokenizer(policy), theirs, f"{place.key}={place.reference!r}")
    return f"{place.reference}, {size}; its vocabulary is the policy's"


def reject_another_vocabulary(policys: Any, others: Any, given: str) -> None:
    """Raise ConfigError if a frozen model's tokenizer lacks or renumbers a token of the policy's.

    given: the key that names the model, with its value.
    """
    ours, theirs = policys.get_vocab(), others.get_vocab()
    if differing := sorted(ours.items() - theirs.items(), key=lambda each: each[1]):
        token, number = differing[0]
        raise ConfigError(
            f"{given} does not have the policy's vocabulary ({len(theirs):,} tokens, not "
            f"{len(ours):,}; the first that differs is {token!r}, number {number}), so that its "
            "tokens stand for other texts; choose a model of the policy's family"
        )


def give_teachers(policy: Policy, config: RunConfig) -> None:
    """Load the policy's teachers that are on this machine.

    Where samples of one cannot be packed, those of the policy are not packed either. A policy that
    has its teachers keeps them.

    Raises ConfigError: one cannot be read, no forward pass agrees with its own, or it does not know
    as many tokens or positions as the policy may use.
    """
    if policy.teachers:
        return
    for place in find_teachers(config):
        if not place.is_served:
            teacher = _load(place, policy)
            policy.packs_rows = policy.packs_rows and teacher.packs_rows
            policy.teachers |= dict.fromkeys(place.environments, teacher)


def _load(place: TeacherPlace, policy: Policy) -> Policy:
    given, max_tokens = f"{place.key}={place.reference!r}", place.max_tokens
    with _naming(place.key):
        there = place.model.model_copy(update={"path": str(_find_folder(place.model))})
        teacher = load_policy(there, seed=0, device=policy.device, max_tokens=max_tokens)
        check_forward(teacher, max_tokens)
    teacher.model.requires_grad_(False)
    reject_another_vocabulary(policy.tokenizer, teacher.tokenizer, given)
    if teacher.max_length is not None and teacher.max_length < max_tokens:
        raise ConfigError(
            f"{given} has {teacher.max_length:,} positions, which are fewer than "
            f"env.max_episode_tokens={max_tokens:,}; lower that, or choose a teacher with a longer "
            "context"
        )
    theirs, ours = (each.model.get_input_embeddings().num_embeddings for each in (teacher, policy))
    if theirs < ours:
        raise ConfigError(
            f"{given} has {theirs:,} embeddings, and the policy {ours:,}; choose a teacher with "
            "at least as many"
        )
    return teacher


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Name a teacher's key in errors about a model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", key)) from error


def teacher_divergence(
    policy: Policy, hidden_UH: torch.Tensor, batch: Batch, temperature: float
) -> torch.Tensor:
    """Return KL(policy || teacher) [N], in nats, both at the temperature.

    It compares the distributions that each trained token was chosen from. Tokens that only the
    teacher has are never chosen, and count only in its normalization. Only a few rows have logits
    at a time, which the backward pass computes again.

    hidden_UH: the policy's, of `Policy.predictors_hidden`
    """
    teacher = policy.teachers[batch.env]

    def part(ours_RH: torch.Tensor, theirs_RH: torch.Tensor) -> torch.Tensor:
        ours_RV = torch.log_softmax(policy.logits(ours_RH).float() / temperature, dim=-1)
        with torch.no_grad():
            theirs_RV = torch.log_softmax(teacher.logits(theirs_RH).float() / temperature, dim=-1)
        return (ours_RV.exp() * (ours_RV - theirs_RV[:, : ours_RV.shape[1]])).sum(dim=-1)

    with torch.no_grad():
        teacher_UH = teacher.predictors_hidden(batch)
    elements = ELEMENTS if hidden_UH.device.type == "cpu" else GPU_ELEMENTS
    num_rows = max(1, elements // policy.model.get_input_embeddings().num_embeddings)
    pairs = zip(hidden_UH.split(num_rows), teacher_UH.split(num_rows), strict=True)
    divergence_U = torch.cat([checkpoint(part, *pair, use_reentrant=False) for pair in pairs])
    return divergence_U.index_select(0, batch.places)
