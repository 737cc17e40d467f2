"""`export`: write a checkpoint as a Hugging Face folder with its adapter merged and a model card.

The folder is written beside its final place, read back, compared with the trained policy, and then
renamed, so it is complete and right, or absent.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openenv_pipe.errors import RunFolderError, TrainingError
from openenv_pipe.extras.export.model_card import model_card
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.probes import TemplateProbe
from openenv_pipe.models.chat.rendering import TemplateRenderer
from openenv_pipe.models.chat.served_template import (
    TEMPLATE_FILE,
    reject_other_prompts,
    served_template,
)
from openenv_pipe.models.forward.own_logprobs import BOUNDS
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.models.safetensors_only import read_model
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.runs.episodes import last_episodes_path, read_recorded_episodes
from openenv_pipe.runs.find import SelectedModel, find_model
from openenv_pipe.system.files import new_folder, write_text
from openenv_pipe.system.out_of_memory import as_out_of_memory

PROBES = (1, 12, 40)  # tokens of the prompts that are compared
MAX_PROMPT = 4000  # characters that the model card shows
EXPORTING = (
    "exporting the model",
    "free memory, or export on a machine with more: all weights are on the CPU, in model.dtype",
)


def export_run(
    word: str,
    output: Path | None,
    *,
    runs_dir: Path | None = None,
    trust: bool,
    notify: Callable[[str], None],
) -> Path:
    """Export what `RUN`, `RUN@40`, `RUN@best` or `RUN@start` names, and return its folder.

    Raises OutOfMemoryError, RunFolderError, ConfigError and TrainingError.
    """
    subject = find_model(word, runs_dir=runs_dir, trust=trust, secrets_of=["model"])
    if subject.step is None:
        what = f"engine={subject.config.engine.type} trains none"
        raise RunFolderError(f"{word!r} has no model to export: {what}; name a run that trains one")
    name = f"{subject.folder.record.id.replace('/', '-')}-{subject.checkpoint_name}"
    target = output or subject.folder.path / "export" / name
    if target.exists():
        raise RunFolderError(
            f"{target} exists and is not overwritten; name another --output (from Python: output)"
        )
    with new_folder(target, "--output") as aside:
        try:
            difference = _write(subject, aside, target)
        except Exception as error:
            if (readable := as_out_of_memory(error, EXPORTING)) is None:
                raise
            raise readable from error
        for file in aside.iterdir():
            file.chmod(aside.stat().st_mode & 0o666)  # as the umask has it; libraries differ
    notify(
        f"read back: logprobs after {len(PROBES)} prompts differ from the policy's by at most "
        f"{difference:.1g} nats"
    )
    return target


def _write(subject: SelectedModel, folder: Path, target: Path) -> float:
    """Write the folder; return the largest difference of a logprob when it is read back.

    target: where the folder will be.
    """
    config = subject.config
    policy = load_policy(
        config.model, seed=config.seed, device=select_device("cpu"), checkpoint=subject.checkpoint
    )
    sees = policy.images is not None
    template = None if sees else served_template(policy.chat)  # It is for messages of text.
    weights = PolicyWeights(policy)
    weights.write_weights(folder)
    policy.save_tokenizer(folder)
    if template is not None:
        write_text(folder / TEMPLATE_FILE, template)
        _compare_prompts(folder, policy.chat)
    prompt = None if sees else _first_prompt(subject.folder.path, policy.tokenizer)
    card = model_card(
        subject.folder,
        subject.checkpoint_name,
        target,
        step=subject.step,
        prompt=prompt,
        sees_images=sees,
    )
    write_text(folder / "README.md", card)
    prompts = [list(range(1, num_tokens + 1)) for num_tokens in PROBES]
    expected_PV = weights.next_logprobs(prompts, temperature=1.0)
    bound = BOUNDS[policy.precision]
    del policy, weights  # so that one copy of the weights is in memory, not two
    return _compare(folder, prompts, expected_PV, bound)


def _first_prompt(run: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return what the model saw first in a recorded episode; None: nothing short was recorded."""
    path = last_episodes_path(run)
    try:
        recorded = read_recorded_episodes(path, {1}) if path else []
    except RunFolderError:  # The weights are sound, and the card does without a prompt.
        return None
    turns = recorded[0].episode.agent_turns if recorded else []
    prompt = str(tokenizer.decode(turns[0].prompt_ids)) if turns else ""
    return prompt if 0 < len(prompt) <= MAX_PROMPT else None


def _compare_prompts(folder: Path, chat: ChatFormat) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = TemplateRenderer(tokenizer)

    def ids_of(probe: TemplateProbe) -> list[int]:
        text = renderer.render(
            probe.messages, prompt=True, tools=probe.tools, template=renderer.template
        )
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    reject_other_prompts(chat, "the exported model", ids_of)


def _compare(
    folder: Path, prompts: list[list[int]], expected_PV: np.ndarray, bound: float
) -> float:
    """Read the written model with transformers alone; return how far its logprobs [P, V] differ.

    Raises TrainingError: they differ by more than `bound`, in nats.
    """
    model = read_model(str(folder))
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts]
    written_PV = torch.log_softmax(torch.stack(rows), dim=-1).numpy()
    difference = float(np.abs(written_PV - expected_PV).max())
    if not difference <= bound:  # also rejects NaN
        raise TrainingError(
            f"the exported model's logprobs differ from the policy's by {difference:.3g} nats, "
            f"where {bound:g} is allowed; nothing was exported. Please report the architecture, "
            f"{type(model).__name__}"
        )
    return difference
