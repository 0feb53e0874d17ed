"""Changes to other packages, made when they are imported: dmuon imports none of them."""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class _Finder(MetaPathFinder):
    """Calls ``patch(module)`` right after the import of ``name``. Others may only look whether it is there."""

    def __init__(self, name: str, patch: Callable):
        self.name, self._patch, self._looking = name, patch, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_patch(spec.loader.exec_module)
        return spec

    def _then_patch(self, execute):
        def exec_module(module):
            execute(module)
            forget(self.name)
            self._patch(module)

        return exec_module


def when_imported(name: str, patch: Callable, *, has: str) -> None:
    """``patch(module)``: now, if the module is imported already and has ``has``; else as soon as it is.
    ``patch`` is idempotent."""
    module = sys.modules.get(name)
    if module is not None and hasattr(module, has):
        patch(module)
    elif not any(isinstance(f, _Finder) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, patch))


def forget(name: str) -> None:
    """Nothing happens any more when ``name`` is imported. Idempotent."""
    sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Finder) and f.name == name)]
