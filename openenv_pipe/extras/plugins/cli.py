"""The command `plugins`: its help. `table` does its work."""

import typer


def plugins() -> None:
    """List the installed plugins, and the experiments, choices and environments that they bring.

    Exit code 1 if one of them cannot be used.

    \b
    openenv-pipe plugins
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.extras.plugins.table import plugins_table
    from openenv_pipe.system.plugins import check_plugins

    found = check_plugins()
    if not found:
        print("no plugins are installed; docs/extending.md describes how to write one")
        return
    print_table(plugins_table(found))
    if any(plugin.problem for plugin in found):
        raise typer.Exit(1)
