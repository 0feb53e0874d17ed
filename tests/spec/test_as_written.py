"""The listings of the documents stand in examples/spec/ line by line."""

import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.spec.running import EXAMPLES

LISTINGS = sorted(Path(__file__).with_name("listings").glob("*.py.txt"))
# A machine without a GPU, a random model instead of a download, and what a listing leaves out with an ellipsis.
SUBSTITUTIONS = {
    '"cuda"': '"cpu"',
    ".cuda()": "",
    '"nccl"': '"gloo"',
    "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())\n": "",
    '"meta-llama/Llama-3.2-3B"': "TINY_LLAMA",
    "predicate=...": "predicate=predicate",
}


def test_there_are_listings():
    assert len(LISTINGS) >= 9


@pytest.mark.parametrize("path", LISTINGS, ids=lambda path: path.name.partition(".")[0])
def test_a_listing_stands_in_its_file(path):
    example = EXAMPLES / path.name.removesuffix(".txt")
    assert lines(listing_of(example.read_text())) == lines(substituted(path.read_text()))


def listing_of(text):
    """What stands between the comments that keep the formatter from it."""
    return "".join(re.findall(r"^# fmt: off\n(.*?)^# fmt: on\n", text, re.DOTALL | re.MULTILINE))


def substituted(text):
    for written, here in SUBSTITUTIONS.items():
        text = text.replace(written, here)
    return text


def lines(text):
    """Without comments, which may be translated, and empty lines."""
    bare = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            bare[row - 1] = bare[row - 1][:column]
    return [line.rstrip() for line in bare if line.strip()]


def test_a_changed_line_is_found():
    listing = LISTINGS[0].read_text()
    assert lines(listing) != lines(listing.replace("model", "modell", 1))
