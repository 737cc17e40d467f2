"""`export`: write a checkpoint as a Hugging Face folder with its adapter merged and a model card.

The folder is written beside its place and renamed, so it is complete or absent.
"""

import shutil
import tempfile
from pathlib import Path

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.models.weights import Publication
from openenv_pipe.reports.model_card import model_card
from openenv_pipe.runs.find import SelectedModel, find_model
from openenv_pipe.system.files import sync_tree, write_text


def export_run(word: str, output: Path | None, *, trust: bool) -> Path:
    """Export what `RUN`, `RUN@40` or `RUN@best` names, and return its folder.

    trust: also of a run whose folder another user made, or that was changed since.

    Raises:
        RunFolderError: The checkpoint does not exist or is damaged, or the output exists.
        ConfigError: The output cannot be written.
    """
    subject = find_model(word, [], trust=trust)
    if subject.checkpoint is None:
        raise RunFolderError(f"{word!r} names no checkpoint; RUN, RUN@STEP and RUN@best do")
    name = f"{subject.folder.record.id.replace('/', '-')}-{subject.checkpoint.name}"
    target = output or subject.folder.path / "export" / name
    if target.exists():
        raise RunFolderError(f"{target} exists and is not overwritten; name another --output")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise ConfigError(f"--output {target} cannot be written: {error}") from error
    try:
        _write(subject, subject.checkpoint, aside, target.name)
        aside.chmod(0o755)  # mkdtemp gives 0700, which others could not read.
        for file in aside.iterdir():
            file.chmod(0o644)
        sync_tree(aside)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def _write(subject: SelectedModel, checkpoint: Path, folder: Path, name: str) -> None:
    config = subject.config
    policy = load_policy(
        config.model, seed=config.seed, device=select_device("cpu"), checkpoint=checkpoint
    )
    Publication(policy).write_weights(folder)
    policy.tokenizer.save_pretrained(folder)
    write_text(folder / "README.md", model_card(subject.folder, checkpoint, name))
