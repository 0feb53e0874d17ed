"""``attach``: from here on a step of the engine is a step of the dedicated matrices, too."""

import functools
import math
import weakref

import torch
import torch.distributed as dist

from dmuon import _C
from dmuon.zero import checkpoint, helpers, norms, public, seams
from dmuon.zero.optimizer import OwnerOptimizer
from dmuon.zero.partitions import Partitions
from dmuon.zero.plan import Plan


class Attached:
    """An engine with its plan: what happens once per step of the engine."""

    def __init__(self, engine, plan: Plan, optimizer: OwnerOptimizer):
        self._engine = weakref.ref(engine)
        self.plan, self.runtime = plan, plan.runtime
        self.optimizer = optimizer
        # DeepSpeed has a rule for gradients that are not finite, but at stage 0 in float32.
        self.decides_nonfinite = engine.optimizer is optimizer
        self._matrices = list(range(len(self.runtime.params)))
        self._gradients = _C.GradientSet(self._matrices, [], [])
        self._managed, self._symmetric = [], _C.SymmetricGradients()
        if self.decides_nonfinite:
            named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
            self._managed = [p for _, p in named]
            self._symmetric.names = [n for n, _ in named]
        self.partitions: Partitions = None  # what DeepSpeed keeps in float32
        self.shows_whole = False  # a checkpoint is being saved
        self._forget_step()

    @property
    def engine(self):
        return self._engine()

    def _forget_step(self) -> None:
        self._norm: float | None = None  # of the dedicated gradients, as the loss scale has them
        self._scale = 1.0
        self._total: float | None = None  # of all gradients, likewise
        self._goes_on: bool | None = None  # set once the step has updated the matrices

    def reduce(self) -> None:
        """Owners have the sums of this step's gradients. Collective."""
        engine = self.runtime.engine
        engine.wait_reductions()
        if self.runtime.adapter.take_kept():
            engine.reduce_accumulated()

    def norm(self) -> float:
        """Of the dedicated gradients, times the loss scale. The first call of a step is collective."""
        if self._norm is None:
            self.reduce()
            self._scale = seams.loss_scale(self.engine)
            self._norm = _C.gradient_norm(self.runtime.engine, self._gradients, 2.0)
        return self._norm

    def combined(self, managed):
        """The norm of all gradients from that of DeepSpeed's, in the form that came in."""
        self.note_total(float(managed))
        return managed.new_tensor(self._total) if torch.is_tensor(managed) else self._total

    def note_total(self, managed: float) -> None:
        norm = self.norm()
        healthy = math.isfinite(norm) and math.isfinite(managed) and managed >= 0
        self._total = math.hypot(managed, norm) if healthy else math.inf

    def clip_all(self) -> None:
        """Stage 0 in float32, where DeepSpeed has torch clip its own gradients."""
        self.reduce()
        engine, max_norm = self.runtime.engine, float(self.engine.gradient_clipping())
        counts = [dist.get_rank() == 0] * len(self._managed)  # reduced: the same on every rank
        every = _C.GradientSet(self._matrices, self._managed, counts)
        self.optimizer._global_grad_norm = _C.clip_gradients(engine, every, max_norm, 2.0, False)

    def update(self) -> bool:
        """Updates the dedicated matrices, in the first call of a step. Whether AdamW is to go on."""
        if self._goes_on is None:
            self._goes_on = self._update()
        return self._goes_on

    def _update(self) -> bool:
        if self.decides_nonfinite:
            self.reduce()
            _C.read_symmetric(self._symmetric, self._managed)
        else:
            self.norm()
            factor = self._factor()
            if factor != 1:
                _C.scale_gradients(self.runtime.engine, self._gradients, factor)
        settings, error = self._settings()
        goes_on = self.optimizer.dedicated.step(settings, self._symmetric, error)
        if not self.decides_nonfinite:
            return True
        self.optimizer.overflow = not goes_on  # read by the engine: was_step_applied()
        return goes_on

    def _settings(self) -> tuple[list, str]:
        try:
            return self.optimizer.engine_settings(), ""
        except ValueError as error:
            return [], str(error)

    def _factor(self) -> float:
        """As DeepSpeed unscales and clips its own."""
        clip, total = float(self.engine.gradient_clipping()), self._total
        if clip <= 0:
            return 1 / self._scale
        if total is None:  # it was given our norm, and combined the two itself
            total = float(self.engine.optimizer._global_grad_norm) * self._scale
        return 1 / (max(1.0, (total / self._scale + 1e-6) / clip) * self._scale)

    def end_step(self) -> None:
        """Of whatever came of it: gradients are dropped, as DeepSpeed drops its own."""
        self.drop_gradients()
        self._forget_step()
        self.runtime.engine.clock().end_step()

    def drop_gradients(self) -> None:
        self.runtime.engine.wait_reductions()
        self.runtime.adapter.take_kept()
        for param in self.runtime.params:
            param.parameter.grad = None


def attach(engine, plan: Plan) -> None:
    """Join an engine that ``deepspeed.initialize`` made and the plan that was made before it.

    Collective: every rank calls it, once, before the first step. ``dmuon.zero.initialize`` does.

    Args:
        plan: of ``dedicate_params_zero``, for the model and the config of the engine.

    Raises:
        ValueError: the engine was not made with ``OwnerOptimizer(..., plan=plan)``; attached already; a
            dedicated parameter was replaced since.
        RuntimeError: this DeepSpeed is not as dmuon knows it.
    """
    optimizer = _check(engine, plan)
    seams.announce_version()
    runtime = plan.runtime
    for param in runtime.params:
        _check_hidden(param)
    attached = Attached(engine, plan, optimizer)
    optimizer.arm(attached)
    runtime.optimizer = weakref.ref(optimizer)
    norms.install(engine, attached)
    attached.partitions = Partitions(engine, optimizer)
    asked = weakref.ref(engine)
    runtime.adapter.set_reduces(lambda: seams.reduces_now(asked()))
    _wrap_step(engine, attached)
    checkpoint.install(engine, attached)
    helpers.install(attached)
    public.install(attached)
    plan.attached = attached
    engine.dmuon = attached


def attached_to(engine) -> Attached:
    """Raises ValueError where ``attach`` was not called."""
    attached = engine.__dict__.get("dmuon")
    if attached is None:
        raise ValueError(
            f"this {type(engine).__name__} has no dedicated matrices. Make it with dmuon.zero.initialize, or "
            "call dmuon.zero.attach(engine, plan)."
        )
    return attached


def _check(engine, plan) -> OwnerOptimizer:
    if not isinstance(plan, Plan):
        raise ValueError(
            f"plan is a {type(plan).__name__}; it must come from dedicate_params_zero."
        )
    if not seams.is_engine(engine):
        raise ValueError(
            f"engine is a {type(engine).__name__}; it must be the engine that deepspeed.initialize returns."
        )
    if plan.attached is not None or "dmuon" in engine.__dict__:
        raise ValueError(
            "attach was called already, by you or by dmuon.zero.initialize. Call it once for each engine."
        )
    if plan.runtime.model() is not engine.module:
        raise ValueError(
            f"the plan was made for another model than this engine's {type(engine.module).__name__}. Give "
            "deepspeed.initialize the model that dedicate_params_zero got."
        )
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, OwnerOptimizer) or optimizer.plan is not plan:
        raise ValueError(
            f"the engine's optimizer is a {type(optimizer).__name__}, which would leave the dedicated matrices "
            'untrained. Give deepspeed.initialize an OwnerOptimizer(params, plan=plan), or "type": "DMuon" in '
            "the config."
        )
    if engine.zero_optimization_stage() != plan.stage:
        raise ValueError(
            f"the engine runs ZeRO stage {engine.zero_optimization_stage()}, the plan was made for stage "
            f"{plan.stage}. Give both the same config."
        )
    computes = seams.compute_dtype(engine)
    if computes != plan.config.compute_dtype:
        raise ValueError(
            f"the engine computes in {computes or 'the dtype of the model'}, the plan was made for "
            f"{plan.config.compute_dtype or 'the dtype of the model'}. Give both the same config."
        )
    return optimizer


def _check_hidden(param) -> None:
    for slot in param.slots:
        module, current = slot.module(), slot.parameters.get(slot.attribute)
        if slot.attribute in module._parameters or not hasattr(current, "_dedicated_owner_rank"):
            raise ValueError(
                f"the dedicated parameter {param.param_name!r} was replaced or registered again after "
                "dedicate_params_zero. Replace parameters, cast and move the model before it."
            )


def _wrap_step(engine, attached: Attached) -> None:
    step, zero_grad = engine.step, engine.zero_grad

    @functools.wraps(step)
    def stepped(*args, **kwargs):
        before = engine.global_steps
        try:
            return step(*args, **kwargs)
        except BaseException:
            seams.leave_step(engine)
            raise
        finally:
            if engine.global_steps != before:
                attached.end_step()
            else:
                attached._forget_step()

    @functools.wraps(zero_grad)
    def zeroed(*args, **kwargs):
        zero_grad(*args, **kwargs)
        attached.drop_gradients()

    engine.step, engine.zero_grad = stepped, zeroed
