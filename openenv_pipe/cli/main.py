"""The commands, their help and their exit codes. `commands/` does their work; no torch is loaded.

Extras add theirs, which `ORDER` places among the others.

Exit codes: 0 success, 1 the pipeline failed, 2 the command or the YAML is wrong, 3 a threshold is
missed or a reproduction differs, 130 interrupted.
"""

import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from traceback import format_exception
from typing import Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand, TyperGroup

from openenv_pipe import __version__
from openenv_pipe.cli import results
from openenv_pipe.cli.arguments import (
    Overrides,
    RunsDir,
    Trust,
    junit_files,
    junit_suite,
    with_runs_dir,
)
from openenv_pipe.cli.completion import complete_bash_value, complete_run, offer_completion
from openenv_pipe.cli.control import command_line, controlled
from openenv_pipe.cli.logs import LogFormat, configure_logging
from openenv_pipe.cli.next_commands import DEMO_TAKES, next_commands
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.cli.streams import is_live, keep_streams
from openenv_pipe.errors import ConfigError, EngineMissingError, FailureError, PipeError, UserError
from openenv_pipe.registry import extras, if_command, load
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.system.process_settings import collect_rarely, set_library_defaults
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import for_people, visible

INTERRUPTED = 130  # the exit code
# File errors that are caused by the machine, not by this program.
OF_THE_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO, errno.ESTALE),
)

# How `--help` lists the commands; those that are not named here come last.
ORDER = (
    *("demo", "train", "sft", "reproduce", "eval", "compare", "view", "watch", "export", "serve"),
    *("show", "check", "lr", "models", "plan", "profile", "runs", "tag", "prune"),
    *("plugins", "env", "engine", "judge", "episodes"),
)

# What `openenv-pipe` alone prints first: where to begin.
HELP = (
    "From one YAML file to a trained, evaluated agent on any OpenEnv environment.\n\n\b\n"
    "openenv-pipe demo                # trains a small language model; no GPU\n"
    "openenv-pipe train conf=echo     # trains a tiny one\n"
    + if_command("view", "openenv-pipe view                # shows curves, episodes and tokens\n")
    + if_command("env", "openenv-pipe env new my_env      # writes an environment to start from\n")
    + if_command("env", "openenv-pipe env find WORD       # finds one that exists\n")
)


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=(*ORDER, *self.commands).index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_alone = not args and not ctx.resilient_parsing
        try:
            return super().parse_args(ctx, args)
        finally:  # Without arguments, the help is printed here.
            if is_alone:
                print(next_commands())


class _WithExample(TyperCommand):
    """Shows the form of the arguments in errors about a missing one and unknown options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            examples = (self.help or "").partition("\b\n")[2].splitlines()
            if type(error).__name__ == "MissingParameter" and examples:
                error.message = f"For example: {examples[0].strip()}"
            raise
        except Exception as error:
            # typer has no name for this error of click.
            has_keys = any(parameter.name == "overrides" for parameter in self.params)
            if type(error).__name__ == "NoSuchOption" and has_keys:
                error.message += "; keys have no dashes, as in conf=NAME."  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="openenv-pipe",
    cls=_InOrder,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # an unexpected error keeps its full traceback
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"openenv-pipe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Log to stderr what happens; -vv logs details.",
        ),
    ] = 0,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines are written.")] = "text",
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    configure_logging(verbose, log_format)


@app.command()
def train(
    overrides: Overrides,
    multirun: Annotated[
        bool,
        typer.Option("--multirun", "-m", help="A sweep: a run for each combination of values."),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Resume a run: its folder, its id, or latest. With -m: the same for a sweep.",
            autocompletion=complete_run,
        ),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(
            metavar="RUN@STEP",
            help="Start a new run from a checkpoint of another run, or from its RUN@start.",
            autocompletion=complete_run,
        ),
    ] = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Train an agent, and evaluate it before and after.

    \b
    openenv-pipe train conf=wordle
    openenv-pipe train conf=wordle model=qwen3_0_6b trainer.steps=50
    openenv-pipe train --resume latest
    openenv-pipe train --fork wordle/0007@40 trainer.optimizer.lr=1e-4
    openenv-pipe train -m conf=echo trainer.optimizer.lr=1e-3,3e-3 'seed=range(0,3)'
    """
    if multirun:
        _multirun()(overrides, resume, fork, runs_dir, trust=trust)
        return
    overrides = with_runs_dir(overrides, runs_dir)
    if resume and fork:
        raise ConfigError("--resume continues a run, --fork makes a new one; use one of them")
    if resume or fork:
        with controlled() as control:
            from openenv_pipe import pipeline

            if resume:
                pipeline.resume(resume, overrides, command_line(), control, trust=trust)
            elif fork:
                pipeline.fork(fork, overrides, command_line(), control, trust=trust)
        return
    from openenv_pipe.config.compose import compose

    composed = compose(overrides)
    from openenv_pipe.environments.hosts.early import early_host

    with early_host(composed.config) as early, controlled() as control:
        from openenv_pipe import pipeline

        pipeline.train(composed, command_line(), control, early)


@app.command()
def demo(overrides: Overrides) -> None:
    """Train a small language model to do sums, on a CPU or a GPU: `train conf=sums`.

    SmolLM2-135M learns sums of one-digit numbers by reward alone, and is evaluated on others. At
    the end, it prints the commands to enter next. Overrides are those of `train`.

    \b
    openenv-pipe demo
    openenv-pipe demo trainer.steps=20
    """
    if other := next((each for each in overrides if each.lstrip("+").startswith("conf=")), None):
        raise ConfigError(f"demo trains conf=sums; enter openenv-pipe train {other.lstrip('+')}")
    notify_user(
        "SmolLM2-135M learns one-digit sums by reward alone (openenv-pipe train conf=sums), in "
        f"{DEMO_TAKES}; Ctrl-C saves and stops"
    )
    train(["conf=sums", *overrides])
    notify_user(next_commands())


def _multirun() -> Callable[..., None]:
    """Return what `train -m` calls. Raises ConfigError: no extra brings it."""
    for extra in extras():
        if extra.multirun:
            return cast("Callable[..., None]", load(extra.multirun))
    raise ConfigError(
        "train -m is not supported: no folder of openenv_pipe/extras/ runs sweeps; give each key "
        "one value, without -m"
    )


app.command("eval")(results.evaluate)


@app.command()
def show(
    overrides: Overrides,
    form: Annotated[
        Literal["yaml", "json"],
        typer.Option("--format", help="yaml, or json as run folders store it"),
    ] = "yaml",
) -> None:
    """Print the configuration: every key, its value, and the file that set it.

    \b
    openenv-pipe show conf=wordle
    openenv-pipe show conf=wordle model=qwen3_1_7b --format json
    """
    from openenv_pipe.config.compose import compose
    from openenv_pipe.config.render import as_json, as_yaml

    composed = compose(overrides)
    text = visible(as_yaml(composed) if form == "yaml" else as_json(composed.config))
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, form, background_color="default", word_wrap=True))


app.command("runs")(results.runs)
app.command("tag")(results.tag)

for _command in (command for extra in extras() for command in extra.commands):
    _target = load(_command.target)
    if isinstance(_target, typer.Typer):
        app.add_typer(_target, name=_command.name)
    else:
        app.command(_command.name)(_target)


def _explain(group: typer.Typer) -> None:
    """Join the lines of each paragraph of the commands' help, so that the terminal wraps it, and
    let errors show an example of it.

    typer keeps the line breaks of a docstring. The lines of a paragraph that begins with click's
    mark \\b, such as examples, stay apart.
    """
    for command in group.registered_commands:
        command.cls = _WithExample
        paragraphs = (command.help or inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(
            each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs
        )
    for subgroup in group.registered_groups:
        if subgroup.typer_instance is not None:
            _explain(subgroup.typer_instance)


_explain(app)


def _print_error(error: PipeError) -> None:
    red, reset = ("\x1b[31m", "\x1b[0m") if is_live(sys.stderr) else ("", "")
    print(f"{red}error:{reset} {for_people(str(error), error.whole_text)}", file=sys.stderr)


def _list_error(error: PipeError) -> None:
    """Write the error into the file of --junit, if the command has not written its results."""
    if wanted := [path for path in junit_files if not path.exists()]:
        from openenv_pipe.commands.findings import failed, write_junit

        with suppress(UserError):  # it cannot be written, as the error may say already
            suite = junit_suite(wanted[0])
            write_junit(wanted[0], suite, [failed(suite, error)])


def _print_traceback(error: Exception) -> int:
    """Print the whole traceback of an error that is a bug, without secrets; return the exit code.

    Running out of memory is not a bug, and gets advice instead.
    """
    if (readable := as_out_of_memory(error)) is not None:
        _print_error(readable)
        return readable.exit_code
    print(visible(redact("".join(format_exception(error)))), end="", file=sys.stderr)
    return FailureError.exit_code


def _install_now(missing: EngineMissingError) -> bool:
    """Ask on a terminal whether to install the engine; return whether it has been installed."""
    has_command = any(group.name == "engine" for group in app.registered_groups)
    if not (has_command and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{missing}. Install it now, some gigabytes? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    with redirect_stdout(sys.stderr):  # stdout is the command's own
        app(["engine", "install", "vllm", "--build", missing.build], standalone_mode=False)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An error becomes a message and an exit code."""
    keep_streams()
    collect_rarely()  # until a run has loaded its libraries
    set_library_defaults()
    junit_files.clear()  # of a command before this one in the same process
    if os.environ.get("_OPENENV_PIPE_COMPLETE") == "complete_bash" and complete_bash_value():
        return
    if not {"--install-completion", "--show-completion"}.intersection(sys.argv):
        offer_completion()

    def run_app() -> None:
        try:
            app(arguments, prog_name="openenv-pipe")
        except EngineMissingError as error:
            if not _install_now(error):
                raise
            app(arguments, prog_name="openenv-pipe")

    sys.exit(exit_code_of(run_app))


def exit_code_of(command: Callable[[], None]) -> int:
    """Call a command, print its error if there is one, and return the exit code.

    A PipeError becomes a message. The traceback of any other error is printed without secrets.
    """
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except PipeError as error:
        _print_error(error)
        _list_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            return _print_traceback(error)
        what = error.filename2 or error.filename or "a file"
        _print_error(FailureError(f"cannot read or write {what}: {error.strerror}"))
        return FailureError.exit_code
    except Exception as error:
        # pydantic turns Ctrl-C into an error of its own, if it comes while a validator is built.
        is_interrupt = type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error)
        return INTERRUPTED if is_interrupt else _print_traceback(error)
    return 0


if __name__ == "__main__":
    main()
