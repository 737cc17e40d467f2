"""`openenv-pipe plugins`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_pipe.extras.plugins.table import plugins_table
from openenv_pipe.system.plugins import find_plugins
from tests.unit.test_plugins import install, letters, site, write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
__all__ = ["letters", "site"]  # fixtures


def test_the_table_names_what_can_be_typed(letters, site):
    write(letters / "conf/trainer/dapo.yaml", "defaults: [grpo]\n")
    install(site, "gone", "gone_plugin")
    names, versions, brought = (
        list(cells) for cells in zip(*plugins_table(find_plugins()).rows, strict=True)
    )
    assert names == ["gone", "letters", "", "", ""]
    assert versions == ["gone-package 1.2", "letters-package 1.2", "", "", ""]
    assert "cannot be used: there is no package 'gone_plugin'" in brought[0]
    assert brought[1:] == [
        "conf=letters",
        "trainer=dapo (replaces the shipped one)",
        "trainer=mine",
        "env.package=abc",
    ]


@pytest.mark.parametrize(("is_broken", "code"), [(False, 0), (True, 1)])
def test_the_command_lists_plugins_without_importing_them(letters, site, is_broken, code):
    if is_broken:
        install(site, "gone", "gone_plugin")
    result = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", "plugins"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert "letters-package 1.2" in result.stdout
    assert "conf=letters" in result.stdout
