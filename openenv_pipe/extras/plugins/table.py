"""What the installed plugins bring, as a table."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from openenv_pipe.system.plugins import Plugin
from openenv_pipe.system.resources import shipped_dir
from openenv_pipe.system.tables import Column, Fit, Table


def plugins_table(plugins: Sequence[Plugin]) -> Table:
    table = Table(Column("plugin"), Column("version", drop=1), Column("brings", fit=Fit.FOLD))
    for plugin in plugins:
        brought = list(_brought(plugin.folder)) if plugin.folder is not None else []
        lines: list[str | Text] = [*brought]
        if plugin.problem:
            lines = [Text(f"cannot be used: {plugin.problem}", "red")]
        lines = lines or ["nothing yet: its folders are empty"]
        for number, line in enumerate(lines):
            own = () if number else (plugin.name, f"{plugin.distribution} {plugin.version}")
            table.add_row(*(own or ("", "")), line)
    return table


def _brought(folder: Path) -> Iterator[str]:
    """What to type for each file and environment: `conf=NAME`, `group=NAME`, `env.package=NAME`."""
    conf = folder / "conf"
    files = (path.relative_to(conf) for path in sorted(conf.rglob("*.yaml")))
    choices = [path for path in files if path.parent != Path()]
    for path in sorted(choices, key=lambda path: path.parent != Path("conf")):
        replaces = (shipped_dir("conf") / path).exists()
        note = " (replaces the shipped one)" if replaces else ""
        yield f"{path.parent.as_posix()}={path.stem}{note}"
    for manifest in sorted((folder / "envs").glob("*/openenv.yaml")):
        yield f"env.package={manifest.parent.name}"
