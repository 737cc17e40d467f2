"""The recorded trials of model families, and the page that shows them."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_that_the_script_makes_of_what_is_recorded():
    script = runpy.run_path(str(ROOT / "benchmarks" / "families.py"))
    trials = script["read_trials"]()
    page = (ROOT / "docs" / "models.md").read_text()
    assert page.endswith(script["MARK"] + script["table"](trials))
    assert page.count("| `qwen3` |") == 1
    assert all(each.failure or each.mismatch <= 1e-4 for each in trials)
