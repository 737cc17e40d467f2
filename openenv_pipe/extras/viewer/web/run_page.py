"""The data of one run's page: its panels and what they mean, alarms, evaluations and logs."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.summaries import summarise_run
from openenv_pipe.reports.alarms import LOOSEST_MISMATCH, find_alarms
from openenv_pipe.runs.checkpoints import StageStep, all_checkpoints, can_resume
from openenv_pipe.runs.evals import env_of, is_of_run
from openenv_pipe.runs.metrics import ENVIRONMENT, MEMORY
from openenv_pipe.system.files import names_in, open_file
from openenv_pipe.system.resources import shipped_dir, short_path
from openenv_pipe.system.secrets import redact

# Section, then title of a panel, then its metrics in the order of their colours.
SECTIONS: dict[str, dict[str, Sequence[str]]] = {
    "Reward": {
        "Reward": ("reward/mean",),
        "Success": ("success/rate",),
        "Spread of the reward": ("reward/std",),
        "Reward terms": ("reward/*",),
    },
    "Episodes": {
        "Turns per episode": ("turns/mean",),
        "Tokens per episode": ("episodes/tokens_mean", "episodes/tokens_max"),
        "Tokens per reply": ("reply/tokens_mean",),
        "Episodes that ended badly": ("episodes/failed", "episodes/truncated"),
        "Replies cut off": ("reply/truncated",),
        "Unusable replies": ("replies/unusable",),
        "Groups": ("groups/trained", "groups/skipped", "groups/unlike"),
        "Groups without a signal": ("skipped/identical", "skipped/solved", "skipped/unsolved"),
        "Groups with a signal, per episode": ("signal/per_episode",),
        "Groups with a signal, per 1000 sampled tokens": ("signal/per_1000_tokens",),
        "Staleness": ("staleness/mean", "staleness/max"),
        "Judge": ("judge/calls", "judge/failed"),
        "Judge's tokens": ("judge/tokens",),
        "Judge's cost": ("judge/cost",),
    },
    "Environments and players": {
        "Reward by environment": ("environment/*/reward/mean",),
        "Success by environment": ("environment/*/success/rate",),
        "Groups with a signal, by environment": ("environment/*/groups/trained",),
        "Turns by environment": ("environment/*/turns/mean",),
        "Unusable replies by environment": ("environment/*/replies/unusable",),
        "Sampled tokens by environment": ("environment/*/tokens/sampled",),
        "Spread of the reward by environment": ("environment/*/reward/std",),
        "Tokens per reply by environment": ("environment/*/reply/tokens_mean",),
        "Entropy by environment": ("environment/*/sampling/entropy",),
        "Episodes that ended badly, by environment": (
            "environment/*/episodes/failed",
            "environment/*/episodes/truncated",
        ),
        "Reward by player": ("player/*/reward",),
        "Success by player": ("player/*/success",),
        "Against earlier policies": ("league/success", "league/reward"),
    },
    "Learning": {
        "Loss": ("loss/total", "loss/policy"),
        "Supervised loss": ("loss/supervised",),
        "Entropy": ("sampling/entropy", "loss/entropy"),
        "KL to the reference": ("loss/kl",),
        "Cross entropy of the environment's tokens": ("loss/echo",),
        "Cross entropy of replayed episodes": ("loss/replay",),
        "Samples with a hint": ("kl/hinted",),
        "KL from the start": ("kl/start",),
        "Gradient norm": ("grad/norm",),
        "Tokens at a clip": ("clip/share", "clip/low", "clip/high"),
        "Ratio": ("ratio/min", "ratio/max"),
        "Advantage": ("advantage/mean", "advantage/std", "advantage/min", "advantage/max"),
        "Learning rate": ("lr",),
    },
    "Agreement of sampler and trainer": {
        "Mismatch of logprobs": ("mismatch/mean", "mismatch/max"),
        "KL of sampler and trainer": ("mismatch/kl",),
        "Effective share of samples": ("mismatch/effective_share",),
        "Correction": ("correction/mean", "correction/bounded"),
        "Check on fixed prompts": ("logprob_check/difference", "logprob_check/moved"),
    },
    "Time and tokens": {
        "Seconds": ("time/step_s", "time/rollout_s", "time/learner_s", "time/*_s"),
        "Tokens per second": ("time/tokens_per_s", "time/learner_tokens_per_s"),
        "Memory": (MEMORY,),
        "Model FLOPs utilisation": ("time/mfu",),
        "Tokens": (
            "tokens/sampled",
            "tokens/trained",
            "tokens/skipped",
            "tokens/echo",
            "tokens/replay",
            "tokens/computed",
        ),
    },
}
OTHER = "Others"
NO_CURVES = re.compile(r"step|stage|(environment/.+/)?episodes/count|time/matrix_tflops")
ROW = re.compile(r"^\| (`[^|]*`) \| ((?:[^|]|\\\|)*) \|(?: ((?:[^|]|\\\|)*) ?\|)?$", re.MULTILINE)
MAX_LOG_BYTES = 64 * 1024
MAX_LOGS = 200
LOG = re.compile(r"attempt_\d+/[\w.@+-]+")


class Panel(TypedDict):
    section: str
    title: str
    names: list[str]


def panels_of(names: Iterable[str]) -> list[Panel]:
    """Put every metric of a run into one panel; unknown ones into a panel of their kind."""
    left = dict.fromkeys(name for name in sorted(names) if not NO_CURVES.fullmatch(name))
    exact = {name for panels in SECTIONS.values() for wanted in panels.values() for name in wanted}
    panels = []
    for section, titles in SECTIONS.items():
        for title, wanted in titles.items():
            found = [name for each in wanted for name in _matching(each, left, exact)]
            for name in found:
                left.pop(name, None)
            if found:
                panels.append(Panel(section=section, title=title, names=found))
    others: dict[str, list[str]] = {}
    for name in left:
        kind, _, _ = name.rpartition("/") if name.startswith(ENVIRONMENT) else name.partition("/")
        others.setdefault(kind, []).append(name)
    panels += [Panel(section=OTHER, title=title, names=found) for title, found in others.items()]
    return panels


def _matching(wanted: str, left: Iterable[str], exact: set[str]) -> list[str]:
    if "*" not in wanted:
        return [wanted] if wanted in left else []
    before, _, after = wanted.partition("*")
    return [
        name
        for name in left
        if name.startswith(before) and name.endswith(after) and name not in exact
    ]


class Meaning(TypedDict):
    meaning: str
    hint: str  # when to look at it; may be empty


@cache
def meanings() -> dict[str, Meaning]:
    """Return the texts by metric. Where several metrics share a row, they share its texts."""
    page = shipped_dir("docs") / "metrics.md"
    if not page.is_file():
        return {}
    found: dict[str, Meaning] = {}
    for names, meaning, hint in ROW.findall(page.read_text(encoding="utf-8")):
        texts = Meaning(meaning=_plain(meaning), hint=_plain(hint))
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = texts
    return found


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("`", "").replace("\\|", "|").strip()


def describe_run(store: RunStore, key: str) -> dict[str, Any]:
    """Return everything about a run but its curves and episodes."""
    folder = store.folder(key)
    record = folder.record
    return {
        **describe_progress(store, key),
        "command": " ".join(record.command),
        "versions": record.versions,
        "machine": record.machine.model_dump(mode="json"),
        "facts": record.facts,
        "attempts": [
            {"number": each.number, "status": each.status, "cause": each.cause}
            for each in record.attempts
        ],
        "overrides": folder.overrides,
        "config": store.config(key),
        "evaluations": list(store.reports(key)),
        "checkpoints": [str(step) for step in checkpoint_steps(folder.path)],
        "logs": logs_of(folder.path),
        "has_episodes": any((folder.path / "episodes").glob("step_*")),
    }


def describe_progress(store: RunStore, key: str) -> dict[str, Any]:
    records, folder = store.metrics(key).records, store.folder(key)
    return {
        **summarise_run(store, key),
        "memory_gib": next(
            (each[MEMORY] for each in reversed(records) if each.get(MEMORY) is not None), None
        ),
        "resume": (
            f"openenv-pipe train --resume {shlex.quote(short_path(folder.path))}"
            if folder.status != "running" and can_resume(folder.path, folder.record, folder.status)
            else None
        ),
        "alarms": [asdict(alarm) for alarm in find_alarms(records, _max_mismatch(store, key))],
    }


def _max_mismatch(store: RunStore, key: str) -> float:
    """Return trainer.max_mismatch; of a configuration that cannot be read, the loosest one."""
    try:
        return float(store.config(key)["trainer"]["max_mismatch"])
    except (LookupError, TypeError, ValueError):
        return LOOSEST_MISMATCH


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of GRPO that have a checkpoint, the newest first."""
    places = [StageStep.of(path) for path in all_checkpoints(folder)]
    return [place.step for place in reversed(places) if place.stage == "grpo"]


def curves(store: RunStore, key: str, *, epoch: int = 0, after: int = 0) -> dict[str, Any]:
    """Return the metrics as columns; only those of records from `after` on if `epoch` still holds.

    A resume replaces the file, and with it the epoch; then all columns are returned. With them come
    the texts that explain the metrics.
    """
    read = store.metrics(key)
    start = after if epoch == read.epoch and after <= len(read.records) else 0
    new = read.records[start:]
    return {
        "epoch": read.epoch,
        "start": start,
        "steps": [record["step"] for record in new],
        "stages": [record["stage"] for record in new],
        "values": {name: [record.get(name) for record in new] for name in read.names},
        "panels": panels_of(read.names),
        "evaluations": evaluation_points(store, key),
        **({} if start else {"explanations": explanations(read.names)}),
    }


def evaluation_points(store: RunStore, key: str) -> list[dict[str, Any]]:
    """Return the evaluations of `env` that belong to a step of training, with their intervals.

    Those of `eval` against another opponent, or with another scoring, are no points of its curve.
    """
    reports = [*store.reports(key).values(), *store.during(key)]
    own = [report.opponent for report in reports if is_of_run(report.label)]
    return [
        {
            "label": report.label,
            "step": report.step,
            "success": report.success and asdict(report.success),
            "reward": report.reward and asdict(report.reward),
        }
        for report in sorted(reports, key=lambda each: each.step or 0)
        if report.step is not None
        and not env_of(report.label)
        and not report.other_scoring
        and report.opponent in (own or [report.opponent])
    ]


def explanations(names: Iterable[str]) -> dict[str, Any]:
    """Return the texts about metrics, for a legend; numbers in a name stand for any number."""
    texts = meanings()
    found = {}
    for name in names:
        general = re.sub(r"/\d+/", "/", name)
        text = texts.get(name) or texts.get(general)
        if text is None and name.startswith("reward/"):
            text = texts.get("reward/NAME")
        if text is not None:
            found[name] = text
    return found


def logs_of(folder: Path) -> list[str]:
    """List the log files of all attempts, the newest attempt's first."""
    logs = folder / "logs"
    found = [f"{part}/{name}" for part in names_in(logs) for name in names_in(logs / part)]
    chosen = [
        name
        for name in found
        if LOG.fullmatch(name) and (logs / name).is_file() and not (logs / name).is_symlink()
    ]
    chosen.sort(key=lambda name: (-int(name.partition("/")[0][8:]), name))
    return chosen[:MAX_LOGS]


def tail(folder: Path, name: str) -> str:
    """Return the end of a log file, without secrets. Raises RunFolderError."""
    if not LOG.fullmatch(name) or ".." in name:
        raise RunFolderError(f"{name!r:.80} is not a log; expected one such as attempt_1/env-0.log")
    path = folder / "logs" / name
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
        content = file.read(MAX_LOG_BYTES)
    text = content.decode(errors="replace")
    if len(content) == MAX_LOG_BYTES:
        text = text.partition("\n")[2]
    return redact(text)
