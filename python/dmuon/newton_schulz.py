"""Newton-Schulz: moves every singular value of a matrix close to 1, without an SVD."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmuon import _C

Coefficients = Sequence[Sequence[float]]


def _rows(named: "_C.CoefficientSet") -> tuple[tuple[float, float, float], ...]:
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
            the CPU: relative error 1e-5 on random matrices, 3e-3 on the cruellest spectra; with
            ``(2,)`` it is 2e-4 there, for two more passes over the matrix.
        deterministic: accepted for symmetry with other backends; the CPU kernels always are, for any
            number of threads.

    Raises:
        ValueError: an unknown backend or kernel, malformed coefficients.
    """

    backend: str = "gram"
    kernel: str = "auto"
    coefficients: Coefficients | None = None
    restart_iterations: Sequence[int] | None = None
    deterministic: bool = False

    def __post_init__(self):
        if self.backend not in ("gram", "direct"):
            raise ValueError(f"backend is {self.backend!r}; it must be 'gram' or 'direct'.")
        if self.kernel != "auto":
            raise ValueError(f"kernel is {self.kernel!r}; this build has only 'auto'.")
        self.options(1 + max((*(self.restart_iterations or ()), 4)))

    def options(self, steps: int, dtype: torch.dtype | None = None) -> "_C.NewtonSchulz":
        """The engine's form of it, checked."""
        options = _C.NewtonSchulz()
        options.algorithm = getattr(_C.NsAlgorithm, self.backend)
        options.coefficients = _coefficient_set(self.coefficients)
        options.steps = _whole_number("ns_steps", steps)
        restarts = self.restart_iterations
        options.restarts = None if restarts is None else list(restarts)
        options.dtype = _ns_dtype(dtype)
        options.validate()
        return options


def _whole_number(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return value


def _ns_dtype(dtype: torch.dtype | None) -> "_C.NsDtype":
    known = {
        None: _C.NsDtype.automatic,
        torch.float32: _C.NsDtype.float32,
        torch.bfloat16: _C.NsDtype.bfloat16,
    }
    if dtype not in known:
        raise ValueError(f"dtype is {dtype}; it must be torch.float32, torch.bfloat16 or None.")
    return known[dtype]


def _coefficient_set(coefficients: Coefficients | None) -> "_C.CoefficientSet":
    if coefficients is None:
        return _C.polar_express_coefficients()
    try:
        rows = tuple(tuple(float(c) for c in row) for row in coefficients)
    except TypeError:
        rows = ()
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(f"coefficients are {coefficients!r}; they must be rows of three numbers.")
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
        G: ``[m, n]`` or ``[b, m, n]``, floating point, any strides. Not modified.
        steps: iterations; each costs ``4 s^2 l + 2 s^3`` FLOPs, s = min(m, n), l = max(m, n).
        coefficients: rows (a, b, c); default ``POLAR_EXPRESS_COEFFICIENTS``.
        dtype: of the products; ``None`` is float32 on the CPU.

    Returns:
        float32, the shape of ``G``. Singular values that were within ``[1e-2, 1]`` of the Frobenius
        norm lie within ``[0.846, 1.124]`` after five Polar Express steps (exact arithmetic). Zero
        stays zero; the scale of ``G`` does not matter.

    Raises:
        ValueError: ``G`` is not 2-D or 3-D floating point, or ``steps < 1``.
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
        given = f"{G.dtype} {tuple(G.shape)}" if isinstance(G, torch.Tensor) else type(G).__name__
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
        rows, cols, batch: of the matrices.
        ns_backend: as ``dmuon.Muon``'s.
    """
    return _C.newton_schulz_kernel(batch, rows, cols, as_newton_schulz(ns_backend).options(5))


def get_backend_status() -> dict[str, str]:
    """What this build and machine have: ``{"gram": ..., "direct": ..., "torch": ...}``, the kernels of a
    256 x 1024 matrix and the version of torch that dmuon was built for. Local."""
    return {
        "gram": get_ns_backend(256, 1024),
        "direct": get_ns_backend(256, 1024, ns_backend="direct"),
        "torch": _C.compiled_torch_version(),
    }
