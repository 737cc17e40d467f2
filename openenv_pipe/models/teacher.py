"""The teacher: another model than the policy as the reference of the KL term.

It is frozen and reads the token ids of the policy, so its vocabulary has to be the policy's.
"""

import contextlib
from collections.abc import Iterator

from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.hub import find_model_folder
from openenv_pipe.models.load import load_policy, load_tokenizer
from openenv_pipe.models.memory_estimate import Shape, read_folder_shape
from openenv_pipe.models.policy import Policy

KEY = "trainer.loss.kl.reference"


def teacher_config(config: RunConfig) -> HubModelConfig | None:
    """Return the model block of the teacher, in the precision of the policy's matrix products.

    Returns None if the reference is the policy itself, or is not used.
    """
    kl, model = config.trainer.loss.kl, config.model
    if kl.reference is None or kl.coef == 0:
        return None
    return HubModelConfig(
        type="hub",
        path=kl.reference,
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

    Raises:
        ConfigError: the teacher is not on this machine, or cannot be read.
    """
    if (teacher := teacher_config(config)) is None:
        return None
    with _naming_key():
        if (folder := find_model_folder(teacher)) is None:
            raise ConfigError(
                f"model.path={teacher.path!r} is not on this machine; name a folder, or get the "
                f"model by `openenv-pipe models --fetch {teacher.path}`"
            )
        return read_folder_shape(teacher, folder)


def check_teacher(config: RunConfig) -> str:
    """Check that the teacher is on this machine and has the policy's vocabulary.

    Returns what `check` reports of it.

    Raises:
        ConfigError: it is not, has another one, or cannot be read.
    """
    if (teacher := teacher_config(config)) is None:
        return ""
    shape = find_teacher_shape(config)
    ours = load_tokenizer(config.model).get_vocab()
    with _naming_key():
        theirs = load_tokenizer(teacher).get_vocab()
    if differing := sorted(ours.items() ^ theirs.items(), key=lambda each: each[1]):
        token, number = differing[0]
        raise ConfigError(
            f"{KEY}={teacher.path!r} has not the policy's vocabulary ({len(theirs):,} tokens, "
            f"not {len(ours):,}; the first that differs is {token!r}, number {number}), so its "
            "logprobs would be of other texts; choose a teacher of the policy's family"
        )
    size = f", {shape.num_parameters / 1e6:,.2f} million parameters" if shape else ""
    return f"{teacher.path}{size}; its {len(theirs):,} tokens are the policy's"


def give_teacher(policy: Policy, config: RunConfig) -> None:
    """Load the policy's teacher, if `trainer.loss.kl.reference` names one.

    Where its samples cannot be packed, those of the policy are not packed either.

    Raises:
        ConfigError: it cannot be read, no forward pass agrees with its own, or it lacks embeddings
            of tokens that the policy may choose.
    """
    if (found := teacher_config(config)) is None:
        return
    max_tokens = config.env.max_episode_tokens
    with _naming_key():
        teacher = load_policy(found, seed=0, device=policy.device, max_tokens=max_tokens)
        check_forward(teacher, max_tokens)
    teacher.model.requires_grad_(False)
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
