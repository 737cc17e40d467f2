"""`export`: a checkpoint as a plain Hugging Face folder, its adapter merged, with a model card.

Refuses a folder that is there already. Written aside and renamed: there is never half a model.
"""

import shutil
import tempfile
from pathlib import Path

from openenv_pipe.commands.evaluate import Subject, find_subject
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.models.weights import Publication
from openenv_pipe.reports.model_card import model_card
from openenv_pipe.system.files import sync_tree, write_text


def export_run(word: str, output: Path | None) -> Path:
    """Exports what `RUN`, `RUN@40` or `RUN@best` names, and returns its folder.

    Raises RunFolderError and ConfigError.
    """
    subject = find_subject(word, [])
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
        aside.chmod(0o755)  # a colleague must be able to read what was made for one
        for file in aside.iterdir():
            file.chmod(0o644)
        sync_tree(aside)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def _write(subject: Subject, checkpoint: Path, folder: Path, name: str) -> None:
    config = subject.config
    policy = load_policy(
        config.model, seed=config.seed, device=select_device("cpu"), checkpoint=checkpoint
    )
    Publication(policy).write_weights(folder)
    policy.tokenizer.save_pretrained(folder)
    write_text(folder / "README.md", model_card(subject.folder, checkpoint, name))
