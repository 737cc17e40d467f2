"""Drive environments of the OpenEnv repository from `env inspect` to `train`, without an edit.

For each environment, `env inspect` writes a block and an experiment into an empty folder, and
`train` takes two steps of it. How both ended is recorded in `benchmarks/results`, where the rows of
other environments stay; the table of docs/third_party_environments.md is made of that file. The
checkout is not changed, and nothing is installed: `--python` names an interpreter in which the
requirements of the environments are installed.

    PYTHONPATH=. python benchmarks/third_party_environments.py ~/OpenEnv --python ~/envs/bin/python
        [--only maze_env,chess_env] [--work FOLDER] [--limit-s 600]
    PYTHONPATH=. python benchmarks/third_party_environments.py  # prints the recorded table
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from openenv_pipe.models.tiny import build_tokenizer

RESULTS = Path(__file__).parent / "results" / "third_party_environments.json"
ANSWERS = {True: "yes", False: "no", None: "not tried"}
CLI = (sys.executable, "-m", "openenv_pipe.cli.main")
# What these environments need to be told, as their own READMEs say. {data}: see `_write_data`.
SETTINGS = {
    "atari_env": ("+env.variables.ATARI_OBS_TYPE=ram",),
    "chat_env": ("+env.variables.TOKENIZER_NAME={data}/tokenizer",),
    "finqa_env": ("+env.variables.FINQA_DATA_PATH={data}/finqa",),
    "textarena_env": (
        "+env.variables.TEXTARENA_ENV_ID=GuessTheNumber-v0",
        "+env.variables.TEXTARENA_DOWNLOAD_NLTK=0",
    ),
}
# Fewer episodes, so that two steps take minutes on a small machine; the files stay as written.
FEW = ("trainer.steps=2", "trainer.tasks_per_step=1", "trainer.group_size=4", "eval.num_tasks=1")
SHORT_WARM_START = ("trainer.warm_start.steps=2", "trainer.warm_start.source.num_episodes=4")
MAX_ERROR = 160  # characters of an error in the table
# In place of the data of finqa_env, which is on a hub.
QUESTIONS = """id,user_query,company,question,answer,question_type,explanation
1,How many quarters has a fiscal year?,acme,How many quarters has a fiscal year?,\\boxed{4},x,x
2,How many halves has a fiscal year?,acme,How many halves has a fiscal year?,\\boxed{2},x,x
3,How many balance sheets are in a report?,acme,How many are in a report?,\\boxed{1},x,x
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the two commands ended for one environment; None: they were not run."""

    name: str
    commit: str  # of the OpenEnv repository
    adapter: str | None  # that `inspect` chose; None: it wrote no block
    sessions: int | None  # that one server allows; None: not measured
    inspected: bool | None
    trained: bool | None
    remark: str  # the error, or what inspect noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--work", type=Path, help="keep the written files and runs here")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each command")
    arguments = parser.parse_args()
    if arguments.checkout is not None:
        checkout = arguments.checkout.resolve()
        show_commit = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
        commit = subprocess.check_output(show_commit, text=True).strip()
        with tempfile.TemporaryDirectory(prefix="openenv-pipe-env-") as temporary:
            work = (arguments.work or Path(temporary)).resolve()
            _write_data(work / "data")
            for package in _packages(checkout, arguments.only):
                folder = work / package.name
                outcome = _try(package, commit, arguments.python, folder, arguments.limit_s)
                _record(outcome)
                print(_row(outcome), flush=True)
    print(table(read_outcomes()), end="")


def read_outcomes() -> list[Outcome]:
    """Read what is recorded, by name."""
    return [Outcome(**row) for row in json.loads(RESULTS.read_text())["rows"]]


def _record(outcome: Outcome) -> None:
    """Put an outcome in the place of the one that is recorded for the same environment."""
    rows = {each.name: asdict(each) for each in [*read_outcomes(), outcome]}
    python = ".".join(map(str, sys.version_info[:2]))
    found = {"openenv": version("openenv"), "python": python}
    RESULTS.write_text(
        json.dumps({**found, "rows": [rows[name] for name in sorted(rows)]}, indent=2) + "\n"
    )


def _packages(checkout: Path, only: str) -> Iterator[Path]:
    names = [name for name in only.split(",") if name]
    for app in sorted((checkout / "envs").glob("*/server/app.py")):
        package = app.parent.parent
        if not names or package.name in names:
            yield package


def _write_data(folder: Path) -> None:
    """Write what environments of SETTINGS would otherwise fetch from a hub."""
    build_tokenizer().save_pretrained(folder / "tokenizer")
    company = folder / "finqa" / "input_companies" / "acme"
    company.mkdir(parents=True)
    tables = company.parent / "tables_cleaned_all_companies.json"
    tables.write_text(json.dumps({"acme": {}}))
    questions = folder / "finqa" / "benchmark_questions" / "finqa.csv"
    questions.parent.mkdir()
    questions.write_text(QUESTIONS)


def _try(package: Path, commit: str, python: str, folder: Path, limit_s: float) -> Outcome:
    """Inspect the environment and train on it, in an empty folder."""
    folder.mkdir(parents=True)
    name = package.name
    block = f"conf/env/{name}.yaml"
    own = [each.format(data=folder.parent / "data") for each in SETTINGS.get(name, ())]
    settings = (f"env.python={python}", *own, "-o", block)
    code, inspected = _run(folder, limit_s, "env", "inspect", str(package), *settings)
    trained, sessions = inspected, None
    if code == 0:
        experiment = yaml.safe_load((folder / "conf" / "conf" / f"{name}.yaml").read_text())
        sessions = experiment["host"]["sessions_per_server"]
        fewer = (*FEW, *(SHORT_WARM_START if "warm_start" in experiment["trainer"] else ()))
        code, trained = _run(folder, limit_s, "train", f"conf={name}", *fewer)
    return Outcome(
        name=name,
        commit=commit,
        adapter=_adapter(folder / block),
        sessions=sessions,
        inspected=trained is not inspected,
        trained=trained is not inspected and code == 0,
        remark=_remark(trained if code else inspected, "error: " if code else "note: "),
    )


def _adapter(block: Path) -> str | None:
    if not block.exists():
        return None
    chosen = [each for each in yaml.safe_load(block.read_text())["defaults"] if each != "base"]
    overrides = [each for each in chosen if isinstance(each, dict)]
    return overrides[0]["override adapter"] if overrides else "text"


def _run(folder: Path, limit_s: float, *arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it wrote to stderr. 124: it took too long."""
    try:
        done = subprocess.run(
            [*CLI, *arguments], cwd=folder, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return 124, f"error: {arguments[0]} took more than {limit_s:g} s"
    (folder / f"{arguments[0]}.log").write_text(done.stdout + done.stderr)
    return done.returncode, done.stderr


def _remark(stderr: str, prefix: str) -> str:
    lines = [line.removeprefix(prefix) for line in stderr.splitlines() if line.startswith(prefix)]
    text = "; ".join(lines).replace("|", "/")
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


def _row(outcome: Outcome) -> str:
    cells = (
        f"`{outcome.name}`",
        outcome.adapter or "",
        "" if outcome.sessions is None else str(outcome.sessions),
        ANSWERS[outcome.inspected],
        ANSWERS[outcome.trained],
        outcome.remark,
    )
    return f"| {' | '.join(cells)} |"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of docs/third_party_environments.md, and a sentence with its sums."""
    tried = [each for each in outcomes if each.inspected is not None]
    num_inspected = sum(each.inspected is True for each in tried)
    num_trained = sum(each.trained is True for each in tried)
    head = (
        f"Of {len(tried)} environments, {num_inspected} were inspected, and {num_trained} trained "
        "as inspected.\n\n"
        "| environment | adapter | sessions | inspected | trained | remark |\n"
        "|---|---|---|---|---|---|\n"
    )
    return head + "".join(f"{_row(outcome)}\n" for outcome in outcomes)


if __name__ == "__main__":
    main()
