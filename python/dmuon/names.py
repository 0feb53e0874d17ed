"""Names of parameters and modules, without what wrappers put into them."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    """``name`` without the parts that torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of them matches the parameter's name or its module's path."""
    path = name.rpartition(".")[0]
    return any(fnmatchcase(name, glob) or fnmatchcase(path, glob) for glob in globs)


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(fqn, module, attribute, parameter) for every slot of the model, tied ones once per name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield clean(join(path, attribute)), module, attribute, parameter


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the first one that ``state_dict`` lists."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, _, _, p in slots(model)}
