"""docs/errors.md quotes what the sources say, and leaves no error out."""

import ast
import re

import pytest

from tests.support.ranks import ROOT

GAP = "\0"  # stands in a message for what is known at run time alone
PYTHON = ROOT / "python" / "dmuon"
CPP = [ROOT / folder for folder in ("engine", "adapters", "kernels")]
KINDS = {"ValueError", "RuntimeError", "ImportError"}
# Broken invariants of dmuon's own, which no caller can cause.
INTERNAL = (
    "engine/transport_checks.cpp",
    "engine/flight_ring.cpp",
    "engine/host_lane.cpp",
    "engine/device_lane.cpp",
    "kernels/sharded_gram.cpp",
    "kernels/sum_pieces.cpp",
)


def python_strings(path):
    """Every string of a file but docstrings, those that are put together with gaps."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) for part in parts_of(node)}
    for node in ast.walk(tree):
        if id(node) not in inside and isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            yield text_of(node)


def parts_of(node):
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.Expr):  # a docstring
        return [node.value]
    return [node.left, node.right] if isinstance(node, ast.BinOp) else []


def text_of(node):
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, (ast.JoinedStr, ast.BinOp)):
        return "".join(map(text_of, parts_of(node)))
    return GAP


def python_errors(path):
    """(where, text) of each `raise` that has a text of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in KINDS and call.args:
            text = text_of(call.args[0])
            if text.strip(GAP):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def cpp_errors(path):
    """(where, text) of each exception: the literals between its brackets."""
    source = path.read_text()
    for match in re.finditer(r"(?:throw \w+|\bfail)\(", source):
        text = literals(source[match.end() : end_of_call(source, match.end())])
        if text.strip(GAP):
            line = source.count("\n", 0, match.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", text


LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"|\'(?:[^\'\\]|\\.)\'')


def end_of_call(source, at):
    depth = 1
    while depth:
        literal = LITERAL.match(source, at)
        if literal:
            at = literal.end()
            continue
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        at += 1
    return at


def literals(call):
    """Neighbours are one text; anything between two is a gap, but for the comma of `message`."""
    text, end = "", 0
    for match in re.finditer(r'"((?:[^"\\]|\\.)*)"', call):
        between = call[end : match.start()].strip()
        text += "" if between in ("", ",") else GAP
        text += match[1].replace('\\"', '"').replace("\\n", "\n")
        end = match.end()
    return text + GAP


def cpp_files():
    files = [p for folder in CPP for p in folder.rglob("*.cpp")]
    return [p for p in files if str(p.relative_to(ROOT)) not in INTERNAL]


def errors():
    # The pages of the integrations have theirs.
    files = [p for p in PYTHON.rglob("*.py") if "integrations" not in p.parts]
    found = [error for path in sorted(files) for error in python_errors(path)]
    found += [error for path in sorted(cpp_files()) for error in cpp_errors(path)]
    return [(where, text) for where, text in found if says_something(text)]


def says_something(text):
    """Else it carries a text that was made elsewhere."""
    return max(map(len, text.split(GAP))) >= 16


def quotes():
    """(line of the page, quotation) of the first column of its tables."""
    for number, line in enumerate((ROOT / "docs" / "errors.md").read_text().splitlines(), 1):
        if line.startswith("| `"):
            first = line[2 : line.index(" | ")]
            yield from ((number, quotation) for quotation in re.findall(r"`([^`]+)`", first))


def pattern(quotation):
    """`…` is anything; what is known at run time alone may stand at no other place."""
    return re.compile(".*".join(re.escape(part) for part in quotation.split("…")), re.DOTALL)


@pytest.fixture(scope="module")
def texts():
    python = [text for path in PYTHON.rglob("*.py") for text in python_strings(path)]
    cpp = [literals(s) for p in cpp_files() for s in p.read_text().split(";\n")]
    return python + cpp


def test_quotations_say_enough_to_be_found():
    short = [q for q in quotes() if len(q[1].replace("…", "")) < 12]
    assert not short


def test_every_quotation_is_in_the_sources(texts):
    gone = [q for q in quotes() if not any(pattern(q[1]).search(text) for text in texts)]
    assert not gone, "no source says this any more: mend docs/errors.md"


def test_every_error_of_the_sources_is_quoted():
    patterns = [pattern(quotation) for _, quotation in quotes()]
    found = list(errors())
    assert len(found) > 200
    left = [e for e in found if not any(p.search(e[1]) for p in patterns)]
    told = "\n".join(f"{where}: {text.replace(GAP, '…')}" for where, text in left)
    assert not left, f"say in docs/errors.md what to do about these:\n{told}"


@pytest.mark.parametrize(
    ("quotation", "text", "found"),
    [
        ("has no … of", f"it has no {GAP} of it", True),
        ("has no x of", f"it has no {GAP} of it", False),
        ("has no", "it had no", False),
    ],
)
def test_a_quotation_stands_for_what_it_says(quotation, text, found):
    assert bool(pattern(quotation).search(text)) is found
