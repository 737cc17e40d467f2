"""Links between pages lead to files of the repository, so they work in a clone and on GitHub."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!#|[a-z]+:)([^)\s#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_leads_to_what_only_a_build_of_the_site_makes(page):
    targets = LINK.findall(CODE.sub("", page.read_text()))
    assert not [target for target in targets if not (page.parent / target).exists()]
