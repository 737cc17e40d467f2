"""docs/extending.md shows the code of the plugin package that CI trains with, and of an extra."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|yaml|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs" / "extending.md").read_text())
SUFFIXES = {"python": ".py", "yaml": ".yaml", "toml": ".toml"}


def test_every_door_is_shown():
    languages = [language for language, _ in BLOCKS]
    assert languages == [*["python"] * 9, "toml", "yaml", *["python"] * 2]


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_the_code_is_that_of_the_plugin_package(language, code):
    pattern = f"*{SUFFIXES[language]}"
    plugin, extras = ROOT / "tests/plugin_package", ROOT / "openenv_pipe/extras"
    files = [*plugin.rglob(pattern), *extras.rglob(pattern)]
    assert any(code in file.read_text() for file in files)
