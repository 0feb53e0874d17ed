"""What docs/comparison.md says was measured is in docs/figures.md, digit by digit."""

import re

from tests.support.ranks import ROOT

DOCS = ROOT / "docs"
# Three digits or more; no versions.
MEASURED = re.compile(r"(?<![\d.])\d+\.\d{2,}(?:e-\d\d)?(?![\d.]*\.\d)")


def numbers_in(page):
    return {m.rstrip(".") for m in MEASURED.findall((DOCS / page).read_text())}


def test_every_measured_number_is_a_figure():
    text = (DOCS / "figures.md").read_text().split("```")[1]
    figures = set(re.findall(r"(?<=\s)\d[\d.e-]*(?=\s)", text))
    quoted = numbers_in("comparison.md")
    assert len(quoted) > 20
    assert not {"0.19.8", "0.3.0"} & quoted
    assert quoted <= figures, f"in no line of figures.md: {sorted(quoted - figures)}"


def test_a_number_that_is_no_figure_is_seen():
    assert MEASURED.findall("is 0.1234, of 0.19.8 and 6.544e-06.") == ["0.1234", "6.544e-06"]
