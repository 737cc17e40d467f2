"""The teacher: another model than the policy as the reference of the KL term.

It is frozen and reads the token ids of the policy, so its vocabulary has to be the policy's.

Shape letters: U predicted tokens, R some of them, N trained tokens, H hidden size, V the policy's
vocabulary.
"""

import contextlib
from collections.abc import Iterator
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

KEY = "trainer.loss.kl.reference"
ELEMENTS = 1 << 20  # logits of each model at a time, on a CPU
GPU_ELEMENTS = 1 << 25  # the same on a GPU, whose kernels have to be long: 128 MiB


def teacher_config(config: RunConfig) -> HubModelConfig | None:
    """Return the model block of the teacher, in the precision of the policy's matrix products.

    Returns None if the reference is the policy itself, on a server, or is not used.
    """
    kl = config.trainer.loss.kl
    if kl.reference is None or kl.coef == 0 or kl.has_served_teacher:
        return None
    return model_there(config.model, kl.reference)


def model_there(model: ModelConfig, path: str) -> HubModelConfig:
    """Return the block of a frozen model beside the policy's, from a folder or a hub."""
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


def find_teacher_shape(config: RunConfig) -> Shape | None:
    """Return the shape of the teacher; None without one, or if its config.json has other keys.

    Raises ConfigError: the teacher is not on this machine, or cannot be read.
    """
    if (teacher := teacher_config(config)) is None:
        return None
    with _naming_key():
        return read_folder_shape(teacher, _find_folder(teacher))


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


def check_teacher(config: RunConfig) -> str:
    """Check that the teacher is on this machine and has the policy's vocabulary.

    Returns what `check` reports of it.

    Raises ConfigError: it is not, has another one, or cannot be read.
    """
    if (teacher := teacher_config(config)) is None:
        return ""
    shape = find_teacher_shape(config)
    size = "memory not estimated: its config.json has other keys"
    if shape is not None:
        size = f"{shape.num_parameters / 1e6:,.2f} million parameters"
    if not is_on_this_machine(config.model):
        return f"{teacher.path}, {size}; its tokens are compared when the policy is here"
    with _naming_key():
        theirs = load_tokenizer(teacher)
    reject_another_vocabulary(load_tokenizer(config.model), theirs, f"{KEY}={teacher.path!r}")
    return f"{teacher.path}, {size}; its tokens are the policy's"


def reject_another_vocabulary(policys: Any, others: Any, given: str) -> None:
    """Raise ConfigError if a frozen model's tokenizer lacks a token of the policy's, or numbers it
    otherwise.

    given: the key that names the model, with its value.
    """
    ours, theirs = policys.get_vocab(), others.get_vocab()
    if differing := sorted(ours.items() - theirs.items(), key=lambda each: each[1]):
        token, number = differing[0]
        raise ConfigError(
            f"{given} has not the policy's vocabulary ({len(theirs):,} tokens, not {len(ours):,}; "
            f"the first that differs is {token!r}, number {number}), so that its tokens are of "
            "other texts; choose a model of the policy's family"
        )


def give_teacher(policy: Policy, config: RunConfig) -> None:
    """Load the policy's teacher, if `trainer.loss.kl.reference` names one.

    Where its samples cannot be packed, those of the policy are not packed either. A policy that has
    its teacher keeps it.

    Raises ConfigError: it cannot be read, no forward pass agrees with its own, or it does not know
    as many tokens or positions as the policy may use.
    """
    if (found := teacher_config(config)) is None or policy.teacher is not None:
        return
    max_tokens = config.max_episode_tokens
    with _naming_key():
        there = found.model_copy(update={"path": str(_find_folder(found))})
        teacher = load_policy(there, seed=0, device=policy.device, max_tokens=max_tokens)
        check_forward(teacher, max_tokens)
    teacher.model.requires_grad_(False)
    reject_another_vocabulary(policy.tokenizer, teacher.tokenizer, f"{KEY}={found.path!r}")
    if teacher.max_length is not None and teacher.max_length < max_tokens:
        raise ConfigError(
            f"{KEY}={found.path!r} has {teacher.max_length:,} positions, which are less than "
            f"env.max_episode_tokens={max_tokens:,}; lower that, or choose a teacher with a longer "
            "context"
        )
    theirs, ours = (each.model.get_input_embeddings().num_embeddings for each in (teacher, policy))
    if theirs < ours:
        raise ConfigError(
            f"{KEY}={found.path!r} has {theirs:,} embeddings, and the policy {ours:,}; choose a "
            "teacher that has as many"
        )
    policy.packs_rows = policy.packs_rows and teacher.packs_rows
    policy.teacher = teacher


@contextlib.contextmanager
def _naming_key() -> Iterator[None]:
    """Name the teacher's key in errors about a model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", KEY)) from error


def teacher_divergence(
    policy: Policy, hidden_UH: torch.Tensor, batch: Batch, temperature: float
) -> torch.Tensor:
    """Return KL(policy || teacher) [N], in nats, both at the temperature.

    It is of the distributions that each trained token was chosen from. Tokens that only the teacher
    has are never chosen, and only count in its own normalization. Few rows have logits at a time,
    which the backward pass computes again.

    hidden_UH: the policy's, of `Policy.predictors_hidden`
    """
    teacher = policy.teacher
    assert teacher is not None, "give_teacher was not called"

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
