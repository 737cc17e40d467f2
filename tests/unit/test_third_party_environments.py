"""The recorded trials of other people's environments, and the page that shows them."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_that_the_script_makes_of_what_is_recorded():
    script = runpy.run_path(str(ROOT / "benchmarks" / "third_party_environments.py"))
    table = script["table"](script["read_outcomes"]())
    page = (ROOT / "docs" / "third_party_environments.md").read_text()
    assert page.endswith(f"<!-- table -->\n{table}")
    assert page.count("| `maze_env` |") == 1
