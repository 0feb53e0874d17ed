"""Hook boundaries: the module whose call makes a unit's weights whole."""

from collections.abc import Callable

from torch import nn

from dmuon.names import clean

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def containers(model: nn.Module) -> list[str]:
    """Paths of the modules whose children are layers."""
    return [
        clean(path)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]


def _is_called(module: nn.Module) -> bool:
    """Containers without a forward of their own are never called."""
    return not isinstance(module, _CONTAINERS) and (type(module).forward is not nn.Module.forward)


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(m, (nn.ModuleList, nn.Sequential)) for m in module.modules())


class Boundaries:
    """Finds the boundary of each dedicated parameter.

    Without a rule of the user's: the outermost called ancestor that is a child of a ``ModuleList`` or
    ``Sequential`` (a transformer block); for other weights the outermost ancestor below the root that
    holds no layers itself. These are the modules one passes to ``fully_shard`` or compiles.
    """

    def __init__(
        self,
        model: nn.Module,
        predicate: Callable[[str, nn.Module], bool] | None,
        strict: bool,
        resolver: Callable | None,
    ):
        self._modules = {clean(path): module for path, module in model.named_modules()}
        self._predicate, self._strict, self._resolver = predicate, strict, resolver

    def of(self, fqn: str, parameter: nn.Parameter) -> str:
        """The path of the boundary of ``fqn``; ``""`` is the model itself."""
        if self._resolver is not None:
            return self._resolved(fqn, self._resolver(fqn, parameter))
        ancestors = self._ancestors(fqn)
        if self._predicate is not None:
            chosen = [path for path in ancestors if self._predicate(path, self._modules[path])]
            if chosen:
                return self._called(fqn, chosen[-1])
            if self._strict:
                raise ValueError(
                    f"parameter {fqn!r} has no ancestor that hook_boundary_predicate accepts; its "
                    f"ancestors are {ancestors}. Widen the predicate, leave the parameter out, or pass "
                    "hook_boundary_strict=False to let dmuon choose."
                )
        return self._default(ancestors)

    def _ancestors(self, fqn: str) -> list[str]:
        """Paths from the root down to the module that holds the parameter."""
        parts = fqn.split(".")[:-1]
        paths = [".".join(parts[:i]) for i in range(len(parts) + 1)]
        return [path for path in paths if path in self._modules]

    def _default(self, ancestors: list[str]) -> str:
        below_root = ancestors[1:]
        for parent, path in zip(ancestors, below_root):
            is_layer = isinstance(self._modules[parent], (nn.ModuleList, nn.Sequential))
            if is_layer and _is_called(self._modules[path]):
                return path
        for path in below_root:
            if _is_called(self._modules[path]) and not _holds_layers(self._modules[path]):
                return path
        called = [path for path in ancestors if _is_called(self._modules[path])]
        return called[-1] if called else ""

    def _called(self, fqn: str, path: str) -> str:
        """``path``, or below it the first module on the way to the parameter that is called."""
        for candidate in self._ancestors(fqn):
            inside = candidate == path or candidate.startswith(path + ".") or not path
            if inside and _is_called(self._modules[candidate]):
                return candidate
        raise ValueError(
            f"the hook boundary {path!r} of parameter {fqn!r} is a "
            f"{type(self._modules[path]).__name__}, which nobody calls, and so is everything between "
            "the two. Choose a module that is called in forward."
        )

    def _resolved(self, fqn: str, given) -> str:
        if isinstance(given, nn.Module):
            paths = [path for path, module in self._modules.items() if module is given]
        else:
            paths = [given] if given in self._modules else []
        if not paths or not (paths[0] == "" or fqn.startswith(paths[0] + ".")):
            raise ValueError(
                f"hook_boundary_resolver gave {given!r} for parameter {fqn!r}; it must give a module "
                "of the model that holds the parameter, or its path."
            )
        return self._called(fqn, paths[0])
