"""The commands of `openenv-pipe env`: help and arguments. The work is in the modules beside it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from openenv_pipe.cli.arguments import Form, Junit
from openenv_pipe.cli.completion import complete_override
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.errors import FailureError
from openenv_pipe.system.resources import group_options
from openenv_pipe.system.secrets import redact

# styles of rich, by the kind of a text that `play` shows
STYLES = {"system": "dim", "user": "cyan", "tool": "cyan", "note": "dim", "reward": "bold green"}


def complete_target(incomplete: str) -> list[str]:
    """Return continuations of a target: the name of a block, or of an experiment."""
    names = [*group_options("env"), *(f"conf={name}" for name in group_options("conf"))]
    return [name for name in names if name.startswith(incomplete) and name != "base"]


app = typer.Typer(
    no_args_is_help=True,
    help="Environments: find, write, play, check them.\n\n\b\n"
    "openenv-pipe env find game\n"
    "openenv-pipe env new my_env\n"
    "openenv-pipe env check conf=wordle\n",
)


TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="An environment by name, conf=NAME, a package's folder, the URL of a server, or a "
        "Docker image with its tag.",
        autocompletion=complete_target,
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="OVERRIDES",
        default_factory=list,
        help="Keys of env and host, as in: env.max_turns=3 host=docker",
        autocompletion=complete_override,
        show_default=False,
    ),
]


@app.command()
def inspect(
    target: TargetName,
    overrides: Overrides,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="conf/env/NAME.yaml: write the block there, the experiment to "
            "conf/conf/NAME.yaml, and what only its model needs to conf/conf/NAME/MODEL.yaml.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Play an environment with random actions, and write a block and an experiment to train on it.

    The limits, sessions and penalties are measured. With --output, `train conf=NAME` works next.
    With model=NAME, prompts and limits are for that model; without it, for random weights.
    If the files of --output exist, another model gets conf/conf/NAME/MODEL.yaml beside them.
    Exit code 1 if the environment cannot be trained on as it is.

    \b
    openenv-pipe env inspect http://127.0.0.1:8000
    openenv-pipe env inspect ./my_env --output conf/env/my_env.yaml
    openenv-pipe env inspect ./my_env model=smollm2_135m -o conf/env/my_env.yaml
    openenv-pipe env inspect ./my_env host=docker
    openenv-pipe env inspect registry.example/my_env:latest
    """
    from openenv_pipe.cli.console import announcing
    from openenv_pipe.extras.lab.experiment import split_overrides
    from openenv_pipe.extras.lab.inspect import inspect_environment
    from openenv_pipe.extras.lab.targets import find_target

    of_model, others = split_overrides(overrides)
    with announcing() as notify:
        found = inspect_environment(find_target(target, others), output, notify, of_model)
    print(redact(f"# conf/env/{found.name}.yaml\n{found.block}"))
    if found.experiment is not None:
        print(redact(f"# conf/conf/{found.name}.yaml\n{found.experiment}"))
        path = f"conf/conf/{found.name}/{found.model}.yaml"
        print(redact(f"# {path}\n{found.for_model}"), end="", flush=True)
    for note in found.notes:
        notify_user(f"note: {note}")
    if found.problem is not None:
        raise FailureError(f"no experiment is written: {found.problem}")
    if output is None:
        print("nothing is written; -o conf/env/NAME.yaml writes the files", file=sys.stderr)
    else:
        print(f"wrote {', '.join(map(str, found.written))}", file=sys.stderr)
        choice = "" if output in found.written else f" model={found.model}"
        print(f"train on it: openenv-pipe train conf={found.name}{choice}", file=sys.stderr)


@app.command()
def check(
    target: TargetName,
    overrides: Overrides,
    policy: Annotated[
        str | None,
        typer.Option(help="A scripted policy, module:name; with conf=NAME, its warm start's."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of the memory check.")] = 1000,
    learn: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            min=0,
            help="With conf=NAME: also train model=tiny for that long, and say what it learnt.",
            show_default=False,
        ),
    ] = None,
    form: Form = "table",
    junit: Junit = None,
) -> None:
    """Play an environment, and report problems that would impair training on it.

    The protocol, sessions, seeds, rewards, leaks of the answer, speed and memory are measured.
    Exit code 1 if something fails.

    \b
    openenv-pipe env check my_env
    openenv-pipe env check wordle --policy wordle.policies:consistent
    openenv-pipe env check conf=wordle --format json
    openenv-pipe env check conf=wordle --junit env_check.xml
    openenv-pipe env check conf=echo --learn 2
    """

    from openenv_pipe.cli.console import announcing, print_findings
    from openenv_pipe.commands.findings import Stopwatch
    from openenv_pipe.extras.lab.check import probe_environment
    from openenv_pipe.extras.lab.targets import find_target

    found = find_target(target, overrides)
    if learn is not None:
        from openenv_pipe.extras.lab.check.learning import probe_learning, tiny_experiment

        tiny_experiment([target, *overrides])  # rejected before the other checks take their time
    with announcing() as notify:
        lines = probe_environment(
            found, policy=policy or found.policy, num_episodes=episodes, notify=notify
        )
        if learn is not None:
            watch = Stopwatch()
            found_out = probe_learning([target, *overrides], minutes=learn, notify=notify)
            lines.append(watch.lap(found_out))
    print_findings(lines, form, junit)


@app.command()
def play(
    target: TargetName,
    overrides: Overrides,
    index: Annotated[int, typer.Option(help="Index of the task in the split.")] = 0,
    split: Annotated[
        Literal["train", "eval"], typer.Option(help="The split of env.tasks.")
    ] = "train",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Default: the task's seed.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Show observations as they are.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Start the server's own web page instead.")
    ] = False,
) -> None:
    """Play an environment by hand: you see what a model would see, and each line is a reply.

    \b
    openenv-pipe env play wordle --index 3
    openenv-pipe env play conf=wordle --raw
    openenv-pipe env play wordle --web
    """
    from openenv_pipe.extras.lab.play import play_environment, serve_page
    from openenv_pipe.extras.lab.targets import find_target

    found = find_target(target, overrides)
    if web:
        serve_page(found, _open_page)
    else:
        play_environment(found, PersonAtTerminal(), split=split, index=index, seed=seed, raw=raw)


class PersonAtTerminal:
    """Shows texts on stdout; each line of stdin is a reply."""

    def __init__(self) -> None:
        from openenv_pipe.cli.console import open_console

        self._console = open_console(soft_wrap=True, highlight=False)

    def show(self, text: str, kind: str) -> None:
        """Show a text. kind: a role of messages, `reward`, `note`, or empty."""
        self._console.print(text, style=STYLES.get(kind))

    def reply(self) -> str:
        """Return the next reply. Raises EOFError at the end of the input."""
        reply = input("> ")
        if not sys.stdin.isatty():
            print(reply)  # piped input would be missing from a transcript
        return reply


def _open_page(page: str) -> None:
    print(f"{page}\nCtrl-C ends it.", flush=True)
    if sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The package's name: letters, digits and _.")],
) -> None:
    """Write a new environment, in ./envs and ./conf, that trains as it stands.

    \b
    openenv-pipe env new my_env
    """
    from openenv_pipe.extras.lab.scaffold import create_environment
    from openenv_pipe.system.resources import short_path

    for path in create_environment(name, Path.cwd()):
        print(short_path(path))
    print(
        f"\nplay it        openenv-pipe env play conf={name}"
        f"\ncheck it       openenv-pipe env check {name}"
        f"\ntrain on it    openenv-pipe train conf={name}"
        f"\ntest it        python -m pip install pytest && python -m pytest envs/{name}"
        f"\nthen make it your own: envs/{name}/README.md says what each file is for"
    )


@app.command()
def find(
    word: Annotated[str, typer.Argument(help="A word in the name or the description.")] = "",
    catalog: Annotated[
        Path | None,
        typer.Option(
            help="Also search this catalog, which `openenv catalog build` has written.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List environments, and how to use each: installed ones, and those that a catalog names.

    Without WORD, all are listed. Nothing is downloaded or run. Exit code 1 if nothing is found.

    \b
    openenv-pipe env find game
    openenv-pipe env find chess --catalog catalog.json
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.extras.lab.find import environments_table, find_environments

    found = find_environments(word, catalog)
    if found:
        print_table(environments_table(found))
    if catalog is None:
        notify_user(
            "note: no catalog was searched; in a clone of a repository of environments, "
            "`openenv catalog build` writes one for --catalog"
        )
    if not found:
        raise FailureError(
            f"no environment has {word!r} in its name or description; `openenv-pipe env find` "
            "lists all, and `openenv-pipe env new NAME` writes one"
        )
