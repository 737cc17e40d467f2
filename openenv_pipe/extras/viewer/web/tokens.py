"""The tokens of an episode as a page shows them: texts, numbers to colour them by, whose they are.

Texts need the run's tokenizer, which every checkpoint has. Before the first checkpoint it is that
of the model which the configuration names, if this machine has it and the run may be acted on
(`runs/trust.py`). Nothing is downloaded. Without a tokenizer, tokens are shown by their ids.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from openenv_pipe.errors import PipeError, RunFolderError
from openenv_pipe.extras.viewer.episodes.query import TRAIN
from openenv_pipe.extras.viewer.web.run_page import checkpoint_steps
from openenv_pipe.models.model_files import BUDGET, read_model_file, token_texts
from openenv_pipe.runs.checkpoints import (
    WARM_START_END,
    StageStep,
    all_checkpoints,
    checkpoint_path,
    fork_origin,
)
from openenv_pipe.runs.episodes import RecordedEpisode
from openenv_pipe.runs.evals import STAGES, during_by_name, read_reports
from openenv_pipe.runs.find import AT_START
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.trained_tokens import RecordedTokens, read_trained_tokens, tokens_path
from openenv_pipe.system.files import read_bytes, stamp_of
from openenv_pipe.types import IMAGE_IDS, Episode, TurnRole

UNTRAINED = "start"  # as RUN@start names the weights that a run began with
MAX_TOKENS = 100_000  # of one episode
IMAGE = "[image]"  # as the text of each of an image's tokens


def first_step(folder: RunFolder) -> StageStep | None:
    """Return where a fork, or GRPO after a warm start, began; None: with the untrained weights."""
    after_warm_start = WARM_START_END if folder.written_config.trainer.warm_start.steps else None
    return fork_origin(folder.record) or after_warm_start


def start_of_training(folder: RunFolder) -> Path | None:
    """Return the checkpoint with which GRPO began, if it is there; None: the untrained weights."""
    first = first_step(folder)
    path = checkpoint_path(folder.path, first) if first else None
    return path if path is not None and path.is_dir() else None


def weights_of(folder: RunFolder, source: str, episode: Episode) -> dict[str, Any]:
    """Return the name of the weights that wrote an episode, and the names of those that are there.

    A name is what follows the @ in RUN@40; null: no weights of this run wrote it.
    """
    kept = [str(step) for step in checkpoint_steps(folder.path)]
    return {"wrote": _wrote(folder, source, episode), "kept": [*kept, UNTRAINED]}


def _wrote(folder: RunFolder, source: str, episode: Episode) -> str | None:
    if source == TRAIN:
        version = next((each for turn in episode.turns for each in turn.policy_versions), None)
        is_untrained = version == 0 and first_step(folder) is None
        return UNTRAINED if is_untrained else None if version is None else str(version)
    label = source.removeprefix("eval/")
    during = during_by_name(folder.path).values()
    reports = {each.label: each for each in during} | read_reports(folder.path)
    report = reports.get(label)
    if report is None or report.temperature is None:
        return None
    if not report.step and label.startswith((AT_START, STAGES[0])):
        return UNTRAINED
    return None if report.step is None else str(report.step)


def tokens_of(
    recorded: RecordedEpisode, trained: RecordedTokens | None, path: Path, *, trust: bool
) -> dict[str, Any]:
    """Return the tokens of an episode as columns, and why texts are missing if they are.

    A token of the environment has `mask` 0, and neither logprob nor advantage. A token of a turn
    that is not trained has `mask` 0 and a logprob. Entropy and mismatch are columns if the learner
    has recorded them. trained: that record. path: the run folder.
    """
    known = recorded.advantages or []
    by_turn = trained.by_turn(recorded.episode) if trained else {}
    names = ("ids", "mask", "logprob", "advantage", "version", "turn")
    columns: dict[str, list[Any]] = {
        name: [] for name in (*names, *(("entropy", "mismatch") if by_turn else ()))
    }
    for number, turn in enumerate(recorded.episode.turns):
        prompt, num_completion = [None] * len(turn.prompt_ids), len(turn.completion_ids)
        unknown = [None] * num_completion
        entropy, mismatch = by_turn.get(number, (unknown, unknown))
        advantage = known[number] if number < len(known) else None
        is_agent, version = turn.role is TurnRole.AGENT, ", ".join(map(str, turn.policy_versions))
        values: dict[str, list[Any]] = {
            "ids": [*turn.prompt_ids, *turn.completion_ids],
            "mask": [0] * len(prompt) + [int(is_agent)] * num_completion,
            "logprob": [*prompt, *[*turn.logprobs, *unknown][:num_completion]],
            "advantage": prompt + [advantage] * num_completion,
            "version": prompt + [version] * num_completion,
            "turn": [number + 1] * (len(prompt) + num_completion),
            "entropy": [*prompt, *entropy],
            "mismatch": [*prompt, *mismatch],
        }
        for name, column in columns.items():
            column += values[name]
    shown = {name: column[:MAX_TOKENS] for name, column in columns.items()}
    texts, problem = texts_of(shown["ids"], path, trust=trust)
    num_more = max(0, len(columns["ids"]) - MAX_TOKENS)
    return {**shown, "texts": texts, "problem": problem, "num_more": num_more}


def trained_tokens_of(episodes: Path) -> Mapping[tuple[str, int], RecordedTokens]:
    """Return what the learner has recorded beside a file of episodes, by group and member.

    A file that is missing, as for evaluations, or damaged records nothing.
    """
    try:
        return read_trained_tokens(tokens_path(episodes))
    except RunFolderError:
        return {}


def texts_of(ids: Sequence[int], path: Path, *, trust: bool) -> tuple[list[str] | None, str | None]:
    """Return the texts of tokens, or why there are none. path: the run folder."""
    if not ids:
        return None, "the model of this run is behind an endpoint that takes messages, not tokens"
    try:
        known = _known_texts(path, trust=trust)
        return [IMAGE if each >= IMAGE_IDS else known.get(each, "") for each in ids], None
    except (PipeError, OSError) as error:
        problem = str(error).partition("\n")[0]
    return None, f"tokens are shown by their ids, because there is no tokenizer: {problem}"


def _known_texts(path: Path, *, trust: bool) -> Mapping[int, str]:
    """Return the texts of a run's tokens by their ids. Raises PipeError or OSError."""
    found = _tokenizer_file(path, trust=trust)
    if found is None:
        return _tiny_texts()
    file, is_of_run = found
    texts = _texts_of_file(file, is_of_run, stamp_of(file))
    if isinstance(texts, PipeError):
        raise texts
    return texts


@lru_cache(maxsize=4)
def _texts_of_file(
    file: Path, is_of_run: bool, _stamp: tuple[int, int, int]
) -> Mapping[int, str] | PipeError:
    """Return the texts, or why there are none, so that this is found out only once."""
    try:
        content = read_bytes(file, BUDGET.max_mb) if is_of_run else read_model_file(file)
        return token_texts(file, content)
    except PipeError as error:
        return error


@cache
def _tiny_texts() -> Mapping[int, str]:
    from openenv_pipe.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    return {number: str(tokenizer.decode([number])) for number in tokenizer.get_vocab().values()}


def _tokenizer_file(path: Path, *, trust: bool) -> tuple[Path, bool] | None:
    """Return the file of a run's tokenizer, and whether it is in the run folder.

    None: the tiny model's. Raises PipeError.
    """
    for checkpoint in reversed(all_checkpoints(path)):
        if (file := checkpoint / "tokenizer.json").is_file():
            return file, True
    folder = RunFolder.open(path)
    if folder.written_config.model.type == "tiny":
        return None
    model = folder.config_to_run(trust=trust, secrets_of=["model"]).model
    assert model.type == "hub"
    file = Path(model.path).expanduser() / "tokenizer.json"
    if file.is_file():
        return file, False
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "tokenizer.json", revision=model.revision)
    if not isinstance(found, str):
        raise RunFolderError("the run has no checkpoint yet, and this machine has no copy of it")
    return Path(found), False
