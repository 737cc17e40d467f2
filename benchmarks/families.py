"""Train one tiny model of each family, in full and with an adapter, and write docs/models.md.

    PYTHONPATH=. python benchmarks/families.py FOLDERS [--families NAME ...] [--processes 2]
    PYTHONPATH=. python benchmarks/families.py  # writes the page of what is recorded

FOLDERS: a folder with a model's folder for each family, in float32, with windows and chunks of few
tokens. Each family is checked and trained for two steps, exported, and read again by transformers
alone; a second run is interrupted after its first step and resumed. Families that are recorded
with the same versions are left out, unless they are named.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from openenv_pipe import compose, train
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.export.command import export_run
from openenv_pipe.models.load import load_policy
from openenv_pipe.runs.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- table -->\n"
START_S = 60.0  # for the environment's server
KINDS = {"full": ("model.lora.rank=0", 1e-3), "lora": ("model.lora.rank=4", 1e-2)}
TITLES = {"full": "in full", "lora": "LoRA"}
# With these learning rates, two steps change logprobs by far more than rounding does.
SMALL = (
    *("conf=echo", "model=hub", "model.dtype=float32", "model.autocast=float32", "device=cpu"),
    *("trainer.steps=2", "trainer.warm_start.steps=0", "trainer.tasks_per_step=1"),
    *("trainer.group_size=4", "trainer.checkpoint.every=1", "trainer.checkpoint.best=null"),
    *("env.max_episode_tokens=2048", "env.max_turns=2", "env.max_reply_tokens=12"),
    *("eval.num_tasks=1", "eval.samples_per_task=1", "eval.baselines=false", "host=attach"),
    *("host.sessions_per_server=16", "num_threads=1"),
)
COLUMNS = (
    *("family", "sampling", "training", "shared prefixes", "mismatch", "mismatch, LoRA"),
    *("export", "export, LoRA", "resume", "rejected because"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What happened to a family; None: it was not reached. Differences are of logprobs, in nats."""

    family: str
    kind: str  # a key of KINDS
    sampler: str | None = None
    learner: str | None = None
    mismatch: float | None = None  # the largest between sampler and learner
    export: float | None = None  # the largest between the exported model and the trained policy
    is_resumed: bool | None = None  # whether weights and metrics equal those of one run
    failure: str = ""


def try_family(model: Path, kind: str, url: str) -> Trial:
    """Train, export and resume in a temporary folder."""
    trial = Trial(family=model.name, kind=kind)
    override, lr = KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        settings = (*SMALL, f"model.path={model}", override, f"trainer.optimizer.lr={lr}")
        settings += (f"host.urls=[{url}]", f"runs_dir={folder}")
        try:
            run = train(*settings)
            forward = json.loads((run.path / "run.json").read_text())["facts"]["forward"]
            trial = dataclasses.replace(
                trial,
                sampler=forward["sampler"],
                learner=forward["learner"],
                mismatch=max(record["mismatch/max"] for record in run.metrics),
            )
            exported = Path(folder) / "exported"
            export_run(str(run.path), exported, trust=False, notify=lambda text: None)
            trial = dataclasses.replace(trial, export=export_difference(run, exported, settings))
            halted = train(*settings, callbacks=[lambda run, metrics: "to be resumed"])
            is_resumed = is_equal(run, train(resume=halted))
            return dataclasses.replace(trial, is_resumed=is_resumed)
        except Exception as error:
            kind_of_error = "" if isinstance(error, PipeError) else f"{type(error).__name__}: "
            return dataclasses.replace(trial, failure=f"{kind_of_error}{error}")


@torch.inference_mode()
def export_difference(run: Run, exported: Path, settings: Sequence[str]) -> float:
    """Return how much logprobs of the exported model differ from those of the last checkpoint."""
    checkpoint = run.checkpoint("last")
    model = compose(*settings).model
    policy = load_policy(model, seed=0, device=torch.device("cpu"), checkpoint=checkpoint)
    token_ids = torch.arange(5, 65)[None]
    found = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    ours, theirs = policy.model_logits(token_ids), found(input_ids=token_ids).logits
    difference = torch.log_softmax(ours, dim=-1) - torch.log_softmax(theirs, dim=-1)
    return float(difference.abs().max())


def is_equal(run: Run, other: Run) -> bool:
    """Return whether two runs have the same metrics, without times, and the same weights."""
    metrics = [[_without_times(record) for record in each.metrics] for each in (run, other)]
    weights = [
        {file.name: file.read_bytes() for file in each.checkpoint("last").rglob("*.safetensors")}
        for each in (run, other)
    ]
    return metrics[0] == metrics[1] and weights[0] == weights[1]


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith("time/")}


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Serve the environment within the block; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = ROOT / "openenv_pipe" / "environments" / "hosts" / "serve_package.py"
    package = ROOT / "envs" / "echo"
    words = [sys.executable, serve, package, "echo.server.app:app", f"--port={port}"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/health")
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("transformers", "torch", "peft")}


def read_trials(given: Mapping[str, str] | None = None) -> list[Trial]:
    """Read what is recorded, by family; given: only if it was recorded with these versions."""
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": given}
    if given not in (None, recorded["versions"]):
        return []
    return [Trial(**row) for row in recorded.get("rows", ())]


def record(trial: Trial) -> None:
    """Put a trial in the place of the one that is recorded for the same family and kind."""
    known = {(each.family, each.kind): each for each in [*read_trials(versions()), trial]}
    rows = [dataclasses.asdict(known[key]) for key in sorted(known)]
    found = {"versions": versions(), "date": f"{datetime.date.today()}", "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def table(trials: Sequence[Trial]) -> str:
    """Return what docs/models.md has behind its mark."""
    recorded = json.loads(RESULTS.read_text())
    found = ", ".join(f"{name} {number}" for name, number in recorded["versions"].items())
    families: dict[str, dict[str, Trial]] = {}
    for trial in trials:
        families.setdefault(trial.family, {})[trial.kind] = trial
    num_trained = sum(
        {each.kind for each in kinds.values() if not each.failure} == {*KINDS}
        for kinds in families.values()
    )
    lines = [
        f"Of {len(families)} families, {num_trained} are trained in full and with LoRA. Measured "
        f"in float32 on a CPU with {found}, the last row on {recorded['date']}.",
        "",
    ]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cells(name, families[name]))} |" for name in sorted(families)]
    return "\n".join(lines) + "\n"


def _cells(name: str, kinds: Mapping[str, Trial]) -> list[str]:
    trials = [kinds[kind] for kind in KINDS if kind in kinds]
    learners = _words(each.learner for each in trials)
    resumed = {each.is_resumed for each in trials} - {None}
    failures = _words(
        f"{TITLES[each.kind]}: {each.failure}".replace("|", "/").replace("\n", " ")
        for each in trials
        if each.failure
    )
    return [
        f"`{name}`",
        _words(each.sampler for each in trials),
        learners,
        {"packed": "yes", "padded": "no"}.get(learners, ""),
        *(_number(kinds[kind].mismatch) if kind in kinds else "" for kind in KINDS),
        *(_number(kinds[kind].export) if kind in kinds else "" for kind in KINDS),
        "equal" if resumed == {True} else "differs" if False in resumed else "",
        failures,
    ]


def _words(words: Iterable[str | None]) -> str:
    return " / ".join(dict.fromkeys(word for word in words if word))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def write_page() -> None:
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}{table(read_trials())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="?")
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if given.folders is not None:
        names = given.families or sorted(each.name for each in given.folders.iterdir())
        if missing := [name for name in names if not (given.folders / name).is_dir()]:
            raise ConfigError(f"{given.folders} has no folder {', '.join(missing)}")
        known = set()
        if not given.families:
            known = {(each.family, each.kind) for each in read_trials(versions())}
        todo = [(name, kind) for name in names for kind in KINDS if (name, kind) not in known]
        with echo_server() as url, ProcessPoolExecutor(given.processes) as pool:
            models = {name: (given.folders / name).resolve() for name in names}
            tried = [pool.submit(try_family, models[name], kind, url) for name, kind in todo]
            for each in as_completed(tried):
                record(each.result())
                print(each.result(), flush=True)
    write_page()


if __name__ == "__main__":
    main()
