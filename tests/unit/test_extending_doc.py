"""docs/extending.md shows the code of the plugin package that CI trains with."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|yaml|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs" / "extending.md").read_text())
SUFFIXES = {"python": ".py", "yaml": ".yaml", "toml": ".toml"}


def test_every_door_is_shown():
    assert [language for language, _ in BLOCKS] == ["python"] * 8 + ["toml", "yaml"]


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_the_code_is_that_of_the_plugin_package(language, code):
    files = (ROOT / "tests" / "plugin_package").rglob(f"*{SUFFIXES[language]}")
    assert any(code in file.read_text() for file in files)
