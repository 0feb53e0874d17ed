"""docs/api.md has every public name, and its docstring says what a caller must know."""

import importlib
import inspect
import pkgutil
import re

import dmuon
import pytest

from tests.support.ranks import ROOT

# What every call takes, and no docstring has to explain.
OBVIOUS = {"self", "cls", "model", "optimizer", "engine", "trainer", "args", "kwargs"}
METHODS = {
    "dmuon.Muon": ["step", "state_dict", "load_state_dict", "add_param_group"],
    "dmuon.zero.OwnerOptimizer": ["step"],
    "dmuon.configuration.Configured": [
        "replicate",
        "optimizer",
        "save_checkpoint",
        "load_checkpoint",
    ],
    "dmuon.distributed_state.State": ["state_dict", "load_state_dict"],
}


def modules():
    """The package, its zero part, and the integrations that there are."""
    yield dmuon
    yield dmuon.zero
    try:
        integrations = importlib.import_module("dmuon.integrations")
    except ModuleNotFoundError:
        return
    for found in pkgutil.iter_modules(integrations.__path__, "dmuon.integrations."):
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as missing:
            assert not missing.name.startswith("dmuon"), missing  # a trainer that is not installed
            continue
        if not found.name.endswith("seams"):
            yield module


def public():
    """(name by which users write it, object)."""
    return [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in modules()
        for name in names_of(module)
    ]


def names_of(module):
    """Its ``__all__``; else what it defines without an underscore."""
    defined = (
        n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
    )
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def described():
    """Every public callable, and the methods that are more than torch's."""
    for name, thing in public():
        if callable(thing):
            yield name, thing
    for of, names in METHODS.items():
        module, _, attribute = of.rpartition(".")
        kind = getattr(importlib.import_module(module), attribute)
        yield from ((f"{of}.{name}", getattr(kind, name)) for name in names)


def documented():
    """Names that the pages' directives give, whole."""
    found = set()
    for page in (ROOT / "docs").glob("*.md"):
        current = ""
        for kind, name in re.findall(
            r"^\.\. (currentmodule|auto\w+):: (\S+)", page.read_text(), re.M
        ):
            if kind in ("currentmodule", "automodule"):
                current = name
                continue
            name = name.removesuffix("()")
            found.add(name if name.startswith("dmuon.") else f"{current}.{name}")
    return found


def test_every_public_name_is_in_the_pages():
    # One object may have two names, dmuon's and a module's: one of them will do.
    objects = dict(public())
    given = {id(objects[name]) for name in documented() if name in objects}
    left = [name for name, thing in objects.items() if id(thing) not in given]
    assert not left, "write these into docs/api.md, or the page of the integration"


def test_the_pages_name_nothing_that_is_not_there():
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize(("name", "thing"), list(described()), ids=lambda value: str(value)[:60])
def test_its_docstring_says_who_calls_it_and_what_it_takes(name, thing):
    text = inspect.getdoc(thing) or ""
    assert re.search(r"\b([Cc]ollective|[Ll]ocal)\b", text), "collective, or local?"
    explained = set(re.findall(r"``([\w.]+)``", text))
    for line in re.findall(r"^\s+([\w, ]+): ", text, re.M):
        explained |= {word.strip() for word in line.split(",")}
    takes = set(inspect.signature(thing).parameters) - OBVIOUS
    assert takes <= explained, f"unexplained: {sorted(takes - explained)}"
