"""The command `check`: its help."""

from openenv_pipe.cli.arguments import Junit, Overrides
from openenv_pipe.cli.progress import notify_user


def check(overrides: Overrides, junit: Junit = None) -> None:
    """Check everything that a run needs, by short trials that leave nothing behind.

    The exit code is 1 if something would fail.

    \b
    openenv-pipe check conf=wordle
    openenv-pipe check conf=wordle --junit check.xml
    """
    from openenv_pipe.config.compose import compose
    from openenv_pipe.config.unused_keys import unused_keys

    composed = compose(overrides)
    for text in unused_keys(composed):
        notify_user(text)
    from openenv_pipe.cli.console import open_console, print_findings

    console = open_console(stderr=True)
    with console.status("loading the libraries") as status:
        notify = status.update if console.is_terminal else notify_user
        notify("loading the libraries")
        from openenv_pipe.extras.check.checks import run_checks

        lines = run_checks(composed.config, lambda name: notify(f"checking: {name}"))
    print_findings(lines, junit=junit)
