"""Newton-Schulz: moves every singular value of a matrix close to 1, without an SVD."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from dmuon import _C

Coefficients = Sequence[Sequence[float]]
Rows = tuple[tuple[float, float, float], ...]


def _rows(named: "_C.CoefficientSet") -> Rows:
    return tuple(tuple(row) for row in named.rows)


#: Rows (a, b, c) of X <- a X + (b A + c A A) X, A = X X^T, one for each step: Polar Express, with a safety
#: factor of 1.05 applied; past the end the last row repeats.
#: Source: arXiv:2505.16932 and Dao-AILab/gram-newton-schulz.
POLAR_EXPRESS_COEFFICIENTS = _rows(_C.polar_express_coefficients())
#: You Jiacheng's five rows, cycled. Source: KellerJordan/modded-nanogpt.
YOU_COEFFICIENTS = _rows(_C.you_coefficients())
#: One row for all steps. Source: Jordan, "Muon", https://kellerjordan.github.io/posts/muon/
JORDAN_COEFFICIENTS = _rows(_C.jordan_coefficients())

_NAMED = {
    POLAR_EXPRESS_COEFFICIENTS: _C.polar_express_coefficients,
    YOU_COEFFICIENTS: _C.you_coefficients,
    JORDAN_COEFFICIENTS: _C.jordan_coefficients,
}


@dataclass(frozen=True)
class NewtonSchulz:
    """How matrices are orthogonalised; may be given as ``Muon(ns_backend=)``. Local, plain data.

    Args:
        backend: ``"gram"`` iterates on the small Gram matrix, ``"direct"`` on the matrix itself.
            Both are the same polynomial; they differ in FLOPs and in rounding.
        kernel: ``"auto"``; which kernel ran is in ``dmuon.report(model)``.
        coefficients: rows (a, b, c); default ``POLAR_EXPRESS_COEFFICIENTS``. Rows of your own repeat
            the last one past the end.
        restart_iterations: steps before which the Gram form is rebuilt from the matrix; ``(2,)`` is
            before the third step. ``None`` leaves them to the kernel, which makes none in float32 on
            the CPU where the short dim is 128 or more and the long one 2.5 times that: relative error 1e-5 on
            random matrices, up to 3e-3 on ill-conditioned ones; with ``(2,)`` up to 3e-4, with ``(1, 3)`` up
            to 2e-4, at most 2.5 times that of torch's direct iteration (``docs/newton_schulz.md``).
        deterministic: accepted for symmetry with other backends; the CPU kernels always are, for any
            number of threads.

    Raises:
        ValueError: an unknown backend or kernel; malformed coefficients or restarts; coefficients that make
            a singular value negative, or larger than 1.5 in the end or 1,000 on the way.
    """

    backend: str = "gram"
    kernel: str = "auto"
    coefficients: Coefficients | None = None
    restart_iterations: Sequence[int] | None = None
    deterministic: bool = False

    def __post_init__(self):
        if not isinstance(self.backend, str) or self.backend not in ("gram", "direct"):
            raise ValueError(f"backend is {self.backend!r}; it must be 'gram' or 'direct'.")
        if not isinstance(self.kernel, str) or self.kernel != "auto":
            raise ValueError(f"kernel is {self.kernel!r}; this build has only 'auto'.")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic is {self.deterministic!r}; it must be True or False.")
        object.__setattr__(self, "coefficients", _rows_of(self.coefficients))
        object.__setattr__(self, "restart_iterations", _restarts_of(self.restart_iterations))
        self.options(max((*(self.restart_iterations or ()), 4)) + 1)

    def options(self, steps: int, dtype: torch.dtype | None = None) -> "_C.NewtonSchulz":
        """The engine's form of it, checked."""
        options = _C.NewtonSchulz()
        options.algorithm = getattr(_C.NsAlgorithm, self.backend)
        options.coefficients = _coefficient_set(self.coefficients)
        options.steps = _whole_number("ns_steps", steps, 1, _C.MOST_NS_STEPS)
        options.restarts = self.restart_iterations
        options.dtype = _ns_dtype(dtype)
        options.validate()
        return options


def _whole_number(name: str, value, least: int, most: int) -> int:
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or not least <= whole <= most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
    return whole


def _ns_dtype(dtype: torch.dtype | None) -> "_C.NsDtype":
    known = {
        None: _C.NsDtype.automatic,
        torch.float32: _C.NsDtype.float32,
        torch.bfloat16: _C.NsDtype.bfloat16,
    }
    if not isinstance(dtype, torch.dtype | None) or dtype not in known:
        raise ValueError(f"dtype is {dtype}; it must be torch.float32, torch.bfloat16 or None.")
    return known[dtype]


def _rows_of(coefficients: Coefficients | None) -> Rows | None:
    if coefficients is None:
        return None
    try:
        most = islice(coefficients, _C.MOST_NS_STEPS + 1)  # the kernel counts them
        rows = tuple(tuple(float(c) for c in islice(row, 4)) for row in most)
    except (TypeError, ValueError, OverflowError):
        rows = ()
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(f"coefficients are {coefficients!r}; they must be rows of three numbers.")
    return rows


def _restarts_of(restarts: Iterable[int] | None) -> tuple[int, ...] | None:
    if restarts is None:
        return None
    try:
        steps = None if isinstance(restarts, str | bytes) else iter(restarts)
    except TypeError:
        steps = None
    if steps is None:
        raise ValueError(
            f"restart_iterations is {restarts!r}; it must be a sequence of steps, such as (2,), or None."
        )
    return tuple(
        _whole_number("a step in restart_iterations", step, 1, _C.MOST_NS_STEPS - 1)
        for step in islice(steps, _C.MOST_NS_STEPS)
    )


def _coefficient_set(rows: Rows | None) -> "_C.CoefficientSet":
    if rows is None:
        return _C.polar_express_coefficients()
    named = _NAMED.get(rows)
    return named() if named else _C.CoefficientSet("custom", rows, _C.PastEnd.repeat_last)


def as_newton_schulz(backend: "str | NewtonSchulz") -> NewtonSchulz:
    """``ns_backend`` in either of its forms."""
    return backend if isinstance(backend, NewtonSchulz) else NewtonSchulz(backend)


def newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    *,
    coefficients: Coefficients | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Orthogonalise each matrix by the direct iteration. Local.

    Args:
        G: ``[m, n]`` or ``[b, m, n]``, any strides. Not modified, not differentiated through.
        steps: iterations; each costs ``4 s^2 l + 2 s^3`` FLOPs, s = min(m, n), l = max(m, n).
        coefficients: rows (a, b, c); default ``POLAR_EXPRESS_COEFFICIENTS``.
        dtype: of the products; ``None`` is float32 on the CPU.

    Returns:
        float32, the shape of ``G``. Singular values that were within ``[1e-2, 1]`` of the Frobenius
        norm lie within ``[0.846, 1.124]`` after five Polar Express steps (exact arithmetic). Zero
        stays zero; the scale of ``G`` does not matter.

    Raises:
        ValueError: ``G`` is not 2-D or 3-D of float64, float32, bfloat16 or float16, or is no plain dense
            tensor with its memory (a DTensor, a FakeTensor, one whose storage was freed); ``steps`` is not
            from 1 to 1000; coefficients as ``NewtonSchulz`` refuses them.
    """
    return _run("direct", G, steps, coefficients, None, dtype)


def gram_newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    *,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Orthogonalise each matrix by the Gram form of the same iteration; see ``newton_schulz``. Local.

    Args:
        G: ``[m, n]`` or ``[b, m, n]``, floating point, any strides. Not modified.
        steps: iterations. With s = min(m, n) and l = max(m, n) all k of them cost
            ``3 s^2 l + (4 k - 3) s^3`` FLOPs, of a symmetric product one triangle, and each restart
            ``3 s^2 l - 3 s^3`` more.
        coefficients: rows (a, b, c); default ``POLAR_EXPRESS_COEFFICIENTS``.
        restart_iterations: steps before which the Gram matrix is rebuilt; ``None`` leaves them to the
            kernel, see ``NewtonSchulz``.
        dtype: of the products; ``None`` is float32 on the CPU.

    Returns:
        float32, the shape of ``G``; ``newton_schulz`` of it but for rounding.

    Raises:
        ValueError: what ``newton_schulz`` refuses; a restart that is not in [1, steps).
    """
    return _run("gram", G, steps, coefficients, restart_iterations, dtype)


def _run(backend, G, steps, coefficients, restarts, dtype) -> torch.Tensor:
    if not isinstance(G, torch.Tensor) or not G.is_floating_point() or G.ndim not in (2, 3):
        given = f"{G.dtype} of {G.ndim} dims" if isinstance(G, torch.Tensor) else type(G).__name__
        raise ValueError(f"G is {given}; it must be a floating-point tensor [m, n] or [b, m, n].")
    chosen = NewtonSchulz(backend, coefficients=coefficients, restart_iterations=restarts)
    return _C.newton_schulz(G.detach(), chosen.options(steps, dtype))


def get_ns_backend(
    rows: int = 256, cols: int = 1024, *, batch: int = 1, ns_backend: str | NewtonSchulz = "gram"
) -> str:
    """The kernel that runs for this shape on this machine, e.g. ``"gram/avx512/float32"``: the form, the
    instructions, the dtype of the products. On the CPU; ``dmuon.report(model)`` says what runs elsewhere.
    Local.

    Args:
        rows, cols, batch: of the matrices, from 0 to 2**31 - 1.
        ns_backend: as ``dmuon.Muon``'s.

    Raises:
        ValueError: one of them is out of range; what ``NewtonSchulz`` refuses.
    """
    for name, value in {"rows": rows, "cols": cols, "batch": batch}.items():
        _whole_number(name, value, 0, 2**31 - 1)
    return _C.newton_schulz_kernel(batch, rows, cols, as_newton_schulz(ns_backend).options(5))


def get_backend_status() -> dict[str, str]:
    """What this build and machine have: ``{"gram": ..., "direct": ..., "torch": ...}``, the kernels of a
    256 x 1024 matrix and the version of torch that dmuon was built for. Local."""
    return {
        "gram": get_ns_backend(256, 1024),
        "direct": get_ns_backend(256, 1024, ns_backend="direct"),
        "torch": _C.compiled_torch_version(),
    }
