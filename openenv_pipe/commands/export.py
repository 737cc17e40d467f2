"""`export`: write a checkpoint as a Hugging Face folder with its adapter merged and a model card.

The folder is written beside its place and renamed, so it is complete or absent.
"""

from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.models.served_template import TEMPLATE_FILE, served_template
from openenv_pipe.models.weights import Publication
from openenv_pipe.reports.model_card import model_card
from openenv_pipe.runs.find import SelectedModel, find_model
from openenv_pipe.system.files import new_folder, write_text


def export_run(
    word: str, output: Path | None, *, runs_dir: Path | None = None, trust: bool
) -> Path:
    """Export what `RUN`, `RUN@40` or `RUN@best` names, and return its folder.

    runs_dir: where runs are looked for, as for `find_run`.
    trust: also of a run whose folder another user made, or that was changed since.

    Raises:
        RunFolderError: The checkpoint does not exist or is damaged, or the output exists.
        ConfigError: The output cannot be written.
    """
    subject = find_model(word, runs_dir=runs_dir, trust=trust)
    if subject.checkpoint is None:
        raise RunFolderError(f"{word!r} names no checkpoint; RUN, RUN@STEP and RUN@best do")
    name = f"{subject.folder.record.id.replace('/', '-')}-{subject.checkpoint.name}"
    target = output or subject.folder.path / "export" / name
    if target.exists():
        raise RunFolderError(f"{target} exists and is not overwritten; name another --output")
    with new_folder(target, "--output") as aside:
        _write(subject, subject.checkpoint, aside, target.name)
        for file in aside.iterdir():
            file.chmod(0o644)
    return target


def _write(subject: SelectedModel, checkpoint: Path, folder: Path, name: str) -> None:
    config = subject.config
    policy = load_policy(
        config.model, seed=config.seed, device=select_device("cpu"), checkpoint=checkpoint
    )
    Publication(policy).write_weights(folder)
    policy.save_tokenizer(folder)
    sees = policy.pictures is not None
    if not sees:  # `served_template` is for messages of text.
        template = folder / TEMPLATE_FILE
        write_text(template, served_template(template.read_text()))
    card = model_card(subject.folder, checkpoint, name, sees_pictures=sees)
    write_text(folder / "README.md", card)
