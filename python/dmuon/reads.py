"""Where weights lie whole on every rank, values of the last step may be on their way when somebody copies the
module or averages its weights. Here he waits for them."""

import functools

from torch import nn
from torch.optim.swa_utils import AveragedModel


def install() -> None:
    """Idempotent, and for good: without a publish on its way it costs nothing."""
    if hasattr(AveragedModel.update_parameters, "_dmuon"):
        return
    nn.Module.__reduce_ex__ = _reduce_ex
    AveragedModel.update_parameters = _waits(AveragedModel.update_parameters)


def _reduce_ex(self, protocol):
    """How ``copy.deepcopy`` and pickle take a module apart; it has no method of its own for it."""
    _wait()
    return object.__reduce_ex__(self, protocol)


def _waits(original):
    @functools.wraps(original)
    def update_parameters(self, model):
        _wait()
        return original(self, model)

    update_parameters._dmuon = True
    return update_parameters


def _wait() -> None:
    """For all models: the module at hand may hold one of them, or be a part of one."""
    from dmuon.runtime import runtimes

    for runtime in runtimes():
        if runtime.resident:
            runtime.engine.wait_publishes()
