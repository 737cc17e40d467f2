"""The command `eval`: evaluate runs on the same tasks, or a model that no run has trained.

With several runs, the first one determines tasks, samples, their seeds, temperature, reward, judge
and the variables of the environment; limits and prompts remain each run's own. Runs of different
environments are rejected. Each report is written into its own run's folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.compose import Composed, compose, readable_errors
from openenv_pipe.config.diff import changed_keys
from openenv_pipe.config.precision import warn_of_precision
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_in_config, known_secrets
from openenv_pipe.errors import ConfigError, PipeError, RunFolderError
from openenv_pipe.pipeline.build import assembled
from openenv_pipe.pipeline.evaluate import (
    baseline_labels,
    evaluate_model,
    play_baselines,
    task_warnings,
)
from openenv_pipe.pipeline.facts import facts_before, targets_of
from openenv_pipe.pipeline.preparation import prepare
from openenv_pipe.pipeline.requirements import check_evaluation
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.reports.report import write_report
from openenv_pipe.runs.checkpoints import all_checkpoints
from openenv_pipe.runs.differences import ABSENT, find_other_facts
from openenv_pipe.runs.evals import BASELINE, Evaluation, env_of, read_reports, save_evaluation
from openenv_pipe.runs.find import PLAYED, SelectedModel, find_model, is_run, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.progress import long_phase

FUNCTIONS = ("callables.", "env_functions.")  # begin the names of facts about functions


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The result of an evaluation, and how to show it."""

    own: list[Row]  # the new reports of what the user named
    played: list[Row]  # the same, and those of the baselines
    shown: list[Row]  # the same or, for a single run, all reports that it has
    config: RunConfig  # of the first subject
    folders: list[Path]  # run folders, whose eval/ has the reports


def evaluate(
    words: Sequence[str], command: Sequence[str], control: RunControl, *, trust: bool
) -> Evaluated:
    """Evaluate the runs that the words name (`RUN`, `RUN@40`, `RUN@best`, `RUN@start`).

    The other words are overrides; without a run they describe the model to evaluate. `runs_dir=DIR`
    is where runs are looked for, and where the folder of a model that no run has trained goes.
    trust: also runs whose folders another user made, or that were changed since.

    Raises:
        RunFolderError: A run or a checkpoint does not exist.
        ConfigError: The overrides do not compose, or the runs cannot be compared.
        FailureError: A server or an engine failed.
    """
    runs_dir = split_runs_dir(words)[0]
    runs = [word for word in words if is_run(word, runs_dir)]
    overrides = [word for word in words if word not in runs]
    for word in overrides:
        if "=" not in word:
            raise RunFolderError(
                f"{word!r} is not a folder; expected a run folder such as runs/wordle/latest "
                "(`openenv-pipe runs` lists them), or overrides such as conf=wordle"
            )
    if runs:
        changes = split_runs_dir(overrides)[1]
        models: list[SelectedModel] = []
        for word in runs:
            # Runs after the first are measured by the reward and the judge of the first.
            used = [block for block in PLAYED if not models or block not in ("reward", "judge")]
            found = find_model(word, changes, runs_dir=runs_dir, trust=trust, secrets_of=used)
            models.append(found)
        return _evaluate_runs(models, runs, control)
    return _evaluate_config(compose(overrides), command, control)


def _evaluate_runs(models: list[SelectedModel], words: list[str], control: RunControl) -> Evaluated:
    subjects = on_the_same_tasks(models)
    for subject in subjects:
        check_evaluation(subject.config, makes_folder=False)
    logs = [_open_logs(subject.folder.path) for subject in subjects]
    rows: list[Row] = []
    baselines: list[Row] = []
    for subject, folder, word in zip(subjects, logs, words, strict=True):
        if (objection := objection_to(subject, word)) is not None:
            control.progress.note(f"eval: {objection}")
        seed, is_first = subjects[0].config.seed, subject is subjects[0]
        work = _play(subject, folder, control, seed=seed, with_baselines=is_first)
        own, others = control.stop.run(work)
        rows += [replace(row, word=word, objection=objection) for row in own]
        baselines += others
    for path in dict.fromkeys(subject.folder.path for subject in subjects):
        _report_anew(path, control)
    rows = _told_apart(rows)
    shown = played_rows = [*rows, *baselines]
    if len(subjects) == 1:  # The table also has the run's earlier evaluations.
        path = subjects[0].folder.path
        earlier = read_reports(path)
        shown = [Row(name=name, report=report, folder=path) for name, report in earlier.items()]
    return Evaluated(
        own=rows,
        played=played_rows,
        shown=shown,
        config=subjects[0].config,
        folders=list(dict.fromkeys(subject.folder.path for subject in subjects)),
    )


def objection_to(subject: SelectedModel, word: str) -> str | None:
    """Return why the model is not the final one of the run that the user has named; None if it is.

    Nothing is wrong with a checkpoint that the user names.
    """
    folder = subject.folder
    if "@" in word:
        return None
    if folder.status != "finished":
        return f"{word} is {folder.status}, not finished"
    checkpoints = all_checkpoints(folder.path)
    if subject.checkpoint is None or subject.checkpoint.name == checkpoints[-1].name:
        return None
    return f"{checkpoints[-1].name} of {word} is damaged"


def _report_anew(path: Path, control: RunControl) -> None:
    """Rewrite a run's report with its new evaluations. A run that still goes on does so itself."""
    try:
        folder = RunFolder.open(path)
        if folder.status != "running":
            write_report(folder)
    except (PipeError, OSError) as error:
        control.progress.note(f"eval: {path / 'report.md'} was not rewritten: {error}")


def _evaluate_config(composed: Composed, command: Sequence[str], control: RunControl) -> Evaluated:
    """Evaluate a model that no run has trained, in a new run folder."""
    config = composed.config
    check_evaluation(config, makes_folder=True)
    control.stop.run(prepare(config, control.progress.note))
    folder = RunFolder.create(
        config, overrides=composed.overrides, command=command, purpose="evaluation"
    )
    config = folder.with_template_time(config)
    label = "start" if config.engine.capabilities.can_train else config.engine.type
    subject = SelectedModel(folder=folder, config=config, checkpoint=None, label=label, step=None)
    try:
        work = _play(
            subject, folder.logs, control, seed=config.seed, with_baselines=True, is_new_run=True
        )
        own, baselines = control.stop.run(work)
    except KeyboardInterrupt:
        folder.finish("interrupted", cause="interrupted")
        raise
    except BaseException as error:
        folder.finish("failed", cause=f"{type(error).__name__}: {error}")
        raise
    folder.finish("finished")
    rows = [*own, *baselines]
    return Evaluated(own=own, played=rows, shown=rows, config=config, folders=[folder.path])


def _told_apart(rows: list[Row]) -> list[Row]:
    """Name rows by the user's words if their runs have the same id, as runs of two machines may."""
    names = [row.name for row in rows]
    return [
        replace(row, name=f"{row.word} {row.report.label}") if names.count(row.name) > 1 else row
        for row in rows
    ]


def on_the_same_tasks(subjects: list[SelectedModel]) -> list[SelectedModel]:
    """Give all subjects the first one's tasks, reward, judge, evaluation settings and variables of
    the environment."""
    first = subjects[0]
    return [first, *(_measured_as(first, subject) for subject in subjects[1:])]


def _measured_as(first: SelectedModel, other: SelectedModel) -> SelectedModel:
    """Raises ConfigError if the two are of different environments, or cannot be measured alike."""
    _reject_other_environments(first, other)
    _reject_other_shares(first, other)
    values, wanted = other.config.model_dump(), first.config.model_dump()
    # Only training chooses a best checkpoint, and by evaluations that are not these.
    values["trainer"]["checkpoint"]["best"] = None
    pairs = [(values, wanted)]
    pairs += [(values["beside"][name], wanted["beside"][name]) for name in values["beside"]]
    for each, given in pairs:
        each["eval"], each["reward"] = given["eval"], given["reward"]
        each["judge"] = given["judge"]
        each["env"]["tasks"]["eval"] = given["env"]["tasks"]["eval"]
        each["env"]["success_reward"] = given["env"]["success_reward"]
        # Variables may determine how an environment scores.
        each["env"]["variables"] = given["env"]["variables"]
    try:
        with readable_errors():
            return replace(other, config=RunConfig.model_validate(values))
    except ConfigError as error:
        raise ConfigError(
            f"{other.folder.path} cannot be measured as {first.folder.path} is, by its tasks, "
            f"reward and settings of eval (KEY=VALUE changes a key of both): {error}"
        ) from None


def _reject_other_environments(first: SelectedModel, other: SelectedModel) -> None:
    ours, theirs = first.config.environments, other.config.environments
    differ = f"{other.folder.path} cannot be compared with {first.folder.path}: its"
    if ours.keys() != theirs.keys():
        raise ConfigError(
            f"{differ} beside has {[*other.config.beside]}, not {[*first.config.beside]}; evaluate "
            "runs of the same environments"
        )
    for env, key in product(ours, ("name", "package", "command")):
        expected, seen = getattr(ours[env].env, key), getattr(theirs[env].env, key)
        if seen != expected:
            prefix = f"beside.{env}." if env else ""
            raise ConfigError(
                f"{differ} {prefix}env.{key} is {seen!r}, not {expected!r}; evaluate runs of the "
                "same environments"
            )


def _reject_other_shares(first: SelectedModel, other: SelectedModel) -> None:
    """Raise ConfigError if eval tasks are a share of tasks that the other run did not train on.

    It would have other eval tasks, or may have trained on those of the first.
    """
    for env, each in first.config.environments.items():
        tasks, key = each.env.tasks, f"{f'beside.{env}.' if env else ''}env.tasks"
        whole = tasks.train.model_dump(mode="json")
        theirs = other.config.environments[env].env.tasks.train.model_dump(mode="json")
        if tasks.eval.type == "share" and theirs != whole:
            name = next(name for name in [*whole, *theirs] if theirs.get(name) != whole.get(name))
            raise ConfigError(
                f"{other.folder.path} cannot be compared with {first.folder.path}, whose eval "
                f"tasks are a share of {key}.train: its {key}.train.{name} is "
                f"{theirs.get(name)!r:.80}, not {whole.get(name)!r:.80}; give both the same "
                f"({key}.train.{name}=VALUE), or evaluate each by itself"
            )


def changed_settings(own: RunConfig, used: RunConfig) -> dict[str, str]:
    """Return by key how the environments, rewards and judges that are used differ from the run's
    own.

    Of a judge, these are the keys that decide its verdicts, if the reward asks it.

    own: as it is written, with its secrets hidden.
    """
    values = used.model_dump(mode="json")
    hidden = RunConfig.model_validate(hide_in_config(values, known_secrets(values)))
    judges = {env: each.judge for env, each in used.environments.items() if each.reward.judged}

    def measures(key: str) -> bool:
        if (found := re.match(r"(?:beside\.([^.]+)\.)?(env|reward|judge)\.(\w+)", key)) is None:
            return False
        env, block, name = found.groups("")
        return block != "judge" or (env in judges and judges[env].decides(name))

    return {
        key: f"{json.dumps(ours)}, not {json.dumps(theirs)}"
        for key, (theirs, ours) in changed_keys(own, hidden).items()
        if measures(key)
    }


def changed_code(recorded: Mapping[str, JsonValue], config: RunConfig) -> dict[str, str]:
    """Return which files of environments and rewards are no longer those of the run.

    recorded: the facts of the run. Functions that it did not use count as settings, not as code.
    """
    blocks = [block for each in config.environments.values() for block in (each.env, each.reward)]
    scoring = {f"callables.{name}" for block in blocks for name in targets_of(block)}
    return {
        each.name: f"{each.now}, not {each.before}"
        for each in find_other_facts(recorded, facts_before(config))
        if each.name in scoring or not each.name.startswith("callables.")
        if ABSENT not in (each.before, each.now) or not each.name.startswith(FUNCTIONS)
    }


def _open_logs(path: Path) -> Path:
    logs = path / "logs" / "eval"
    try:
        for folder in (logs, path / "eval"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"the evaluation cannot be written to {path}: {error}") from None
    return logs


def _with_changes(subject: SelectedModel, played: Sequence[Evaluation]) -> list[Evaluation]:
    """Write into the reports what is not as in the run's own evaluations."""
    own, used = subject.folder.written_config, subject.config
    changed = changed_settings(own, used) | changed_code(subject.folder.record.facts, used)
    found = []
    for each in played:
        env = env_of(each.report.label)
        usual, confidence = (run.environments[env].eval.confidence for run in (own, used))
        update = {
            "measured_with": changed,
            "confidence": None if confidence == usual else confidence,
        }
        found.append(replace(each, report=each.report.model_copy(update=update)))
    return found


async def _play(
    subject: SelectedModel,
    logs: Path,
    control: RunControl,
    *,
    seed: int,
    with_baselines: bool,
    is_new_run: bool = False,
) -> tuple[list[Row], list[Row]]:
    """Play and save the evaluations; a new run also records the code and image it played.

    Returns the rows of the subject, and those of the baselines.

    seed: of the sampling, the same for all subjects; that of a run may also have made its weights.
    """
    progress = control.progress
    seeded = subject.config.model_copy(update={"seed": seed})
    if warning := warn_of_precision(subject.config):
        progress.note(f"eval: {warning}")
    async with assembled(
        subject.config, logs, [subject.folder.verdicts], progress, checkpoint=subject.checkpoint
    ) as components:
        rollout = components.rollout
        assert rollout is not None
        if is_new_run:
            subject.folder.update(**rollout.facts())
        for warning in await task_warnings(rollout):
            progress.note(f"eval: {warning}")
        text = f"evaluating {subject.folder.record.id} {subject.label}"
        async with long_phase(progress, text) as count:
            played = await evaluate_model(seeded, rollout, subject.label, subject.step, count)
        own = _with_changes(subject, played)
        for evaluation in own:
            save_evaluation(subject.folder.path, evaluation)
        baselines: list[Evaluation] = []
        if with_baselines and (labels := baseline_labels(subject.config)):
            names = ", ".join(each.removeprefix(BASELINE) for each in labels)
            async with long_phase(progress, f"playing the baselines: {names}") as count:
                found = await play_baselines(seeded, rollout, count)
            baselines = _with_changes(subject, found)
        for evaluation in baselines:
            save_evaluation(subject.folder.path, evaluation)
    path, run = subject.folder.path, subject.folder.record.id
    rows = [
        Row(
            name=f"{run} {each.report.label}",
            report=each.report,
            folder=path,
            duration_s=each.duration_s,
        )
        for each in own
    ]
    return rows, [Row(name=e.report.label, report=e.report, folder=path) for e in baselines]
