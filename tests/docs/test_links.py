"""Files that README and pages link to are there. (The builder of the pages sees to anchors.)"""

import re

import pytest

from tests.support.ranks import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", prose)
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_readme_lists_the_pages():
    readme = (ROOT / "README.md").read_text()
    pages = {page.name for page in PAGES[1:]} - {"index.md", "api.md"}
    assert not {name for name in pages if f"docs/{name}" not in readme}
