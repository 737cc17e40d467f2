"""Each command that README, docs, workflows and help show exists with its options, and composes if
it is shown in a block.

No command is run here: most would train for hours, or need a GPU, a cluster, a hosted model or
another machine. Which ones are run elsewhere: "Commands on pages" of tests/README.md.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from openenv_pipe.cli.main import app
from openenv_pipe.config.compose import amend, compose
from openenv_pipe.extras.lab.scaffold import create_environment
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.extras.sft.command import compose_sft
from openenv_pipe.extras.sizing.constants import split_cluster
from openenv_pipe.extras.sweeps.multirun import read_request
from openenv_pipe.system.resources import group_options

ROOT = Path(__file__).parents[2]
NAMES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "AGENTS", "examples/README")
PAGES = [
    *(ROOT / f"{name}.md" for name in NAMES),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "skills").glob("*/SKILL.md")),
]
COMMAND: Any = typer.main.get_command(app)
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(openenv-pipe [^`]+)`")
NAMED_FILE = re.compile(r"# (conf/(?:conf|env)/\w+\.yaml)\n")
START = re.compile(r"(?:^|&& |-- |entry: |run: )openenv-pipe (.*)")
ENDS = ("&&", ">", "|")
# These have effects when they are read, or exit.
EAGER = ("--version", "--install-completion", "-v")
VARIABLES = {
    **dict.fromkeys(("OPENAI_API_KEY", "JUDGE_MODEL", "MY_TOKEN"), "a-value"),
    "JUDGE_BASE_URL": "http://127.0.0.1:8000/v1",
}
FOLDER = re.compile(r"cd (examples/\w+)")


def in_lines(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield the folder, if one is named, and the words of each command in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split("(?=&& openenv-pipe)", line.strip()):
            if match := START.search(part):
                words = shlex.split(match[1], comments=True)
                end = next((index for index, word in enumerate(words) if word in ENDS), None)
                folder = FOLDER.search(line)
                yield folder and folder[1], words[:end]


def commands(command: Any = COMMAND) -> Iterator[Any]:
    """Yield the commands, also those of groups."""
    children = getattr(command, "commands", {}).values()
    yield from (each for child in children for each in commands(child))
    yield command


def shown_commands() -> Iterator[tuple[bool, str | None, list[str]]]:
    """Yield whether a command is shown in a block, the folder it is for, and its words."""
    for page in PAGES:
        text = page.read_text()
        # Of --format trl|jsonl, the first.
        named = [code.split("|")[0] for code in INLINE.findall(FENCE.sub("", text))]
        yield from ((True, *each) for code in FENCE.findall(text) for each in in_lines(code))
        yield from ((False, *each) for code in named for each in in_lines(code))
    for command in commands():
        yield from ((True, *each) for each in in_lines(command.help or ""))


# Each command once; shown whole if it is anywhere.
SHOWN = {
    " ".join(words): (is_whole, folder, words)
    for is_whole, folder, words in sorted(shown_commands(), key=lambda each: each[0])
    if words and words[0] not in EAGER
}


def find_command(words: Sequence[str]) -> tuple[Any, tuple[str, ...], list[str]]:
    """Return the command, its path, and the words behind it. Raises KeyError if there is none."""
    command, path, left = COMMAND.commands[words[0]], (words[0],), list(words[1:])
    if left and hasattr(command, "commands"):
        if path == ("episodes",) and left[0] not in command.commands:
            left.insert(0, "show")
        command, path = command.commands[left[0]], (*path, left.pop(0))
    return command, path, left


@contextmanager
def without_arguments() -> Iterator[None]:
    """Let arguments be missing."""
    try:
        yield
    except typer.BadParameter as error:
        if type(error).__name__ != "MissingParameter":
            raise


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with `env new my_env` and the YAML files that the pages show under their names.

    Packages and files that a reader brings are there under the names that the pages give them.
    """
    folder = tmp_path_factory.mktemp("project")
    create_environment("my_env", folder)
    for page in PAGES:
        for code in FENCE.findall(page.read_text()):
            if (match := NAMED_FILE.match(code)) and not (folder / match[1]).exists():
                (folder / match[1]).write_text(code)
    for package in ("my_env", "OpenEnv/envs/coding_env"):
        shutil.copytree(folder / "envs/my_env", folder / package)
    (folder / "conf/reward").mkdir()
    shutil.copyfile(ROOT / "conf/reward/env.yaml", folder / "conf/reward/my_reward.yaml")
    (folder / "conversations.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    return folder


@pytest.mark.parametrize("shown", SHOWN)
def test_a_shown_command_exists_and_composes(shown, project, monkeypatch):
    is_whole, folder, words = SHOWN[shown]
    monkeypatch.chdir(project if folder is None else ROOT / folder)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    command, path, left = find_command(words)
    # A sentence may name a command alone, or leave out its arguments.
    if is_whole:
        compose_as(path, command.make_context(path[-1], left).params)
    elif left:
        with without_arguments():
            command.make_context(path[-1], left)


def compose_as(path: tuple[str, ...], given: dict[str, Any]) -> None:
    """Compose what the command would, without the run or the model that it needs."""
    words = [*(given.get("overrides") or given.get("words") or given.get("subjects") or ())]
    run = given.get("run") or given.get("resume") or given.get("fork")
    runs = [*([run] if run else []), *(word for word in words if "=" not in word)]
    overrides = [word for word in words if "=" in word]
    if path == ("engine", "command"):
        overrides.append("engine=vllm")
    if path == ("demo",):
        overrides.insert(0, "conf=sums")
    if path == ("plan",):
        _, overrides = split_cluster(overrides)
    if path == ("sft",):
        compose_sft(given["data"], overrides, given["passes"])
    elif path[0] == "env" and "target" in given:
        find_target(given["target"], overrides)
    elif path == ("serve",) and given["train"]:
        compose(["agent=client", run, *given["extra"]])
    elif given.get("multirun") and overrides:
        jobs = read_request(overrides).jobs
        for job in {jobs[0], jobs[-1]}:
            compose(job)
    elif runs and not any(word.startswith("conf=") for word in overrides):
        amend(compose([f"conf={experiment_of(runs[0])}"]).config, overrides)
    elif overrides:
        compose(overrides)


def experiment_of(run: str) -> str:
    """Return the experiment of a run's name: wordle of runs/wordle/0007@40, and of RUN."""
    name, _, rest = run.removeprefix("runs/").partition("/")
    return name if rest and name in group_options("conf") else "wordle"


def test_commands_are_found():
    assert len(SHOWN) > 200
