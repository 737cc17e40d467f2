"""The command `check`: its help."""

from openenv_pipe.cli.arguments import Junit, Overrides
from openenv_pipe.cli.progress import build_progress, notify_user


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
    progress = build_progress()
    with progress.phase("loading the libraries"):
        from openenv_pipe.cli.console import print_findings
        from openenv_pipe.extras.check.checks import run_checks

    print_findings(run_checks(composed.config, progress), junit=junit)
