"""The error of Newton-Schulz in float32, form by form, beside that of torch's direct iteration: five
steps of Polar Express on matrices of chosen singular values, against the same iteration in float64."""

import dmuon
import torch
from support import Figure, run_ranks

SHAPES = [(32, 128), (128, 192), (128, 256), (128, 512), (256, 384), (256, 1024), (512, 2048)]
FORMS = {
    "direct": lambda x: dmuon.newton_schulz(x),
    "gram, as it comes": lambda x: dmuon.gram_newton_schulz(x),
    **{
        f"gram, restarts {restarts}": lambda x, r=restarts: dmuon.gram_newton_schulz(
            x, restart_iterations=r
        )
        for restarts in ((1, 3), (2,), ())
    },
}
TWICE_TORCH = {("direct", "random"), ("direct", "other spectra"), ("gram, as it comes", "random")}


def spectra(k: int) -> dict[str, torch.Tensor]:
    values = {f"{d} decades": torch.logspace(0, -d, k, dtype=torch.float64) for d in (2.3, 3, 4, 6)}
    head = torch.zeros(k, dtype=torch.float64)
    head[0] = 1
    values |= {"rank 1": head, "one over the rest": head.clamp(min=1e-3)}
    values["four over the rest"] = torch.where(torch.arange(k) < 4, 1.0, 1e-4).double()
    halves = (torch.arange(k) < k // 2).double()
    return values | {"half of full rank": halves, "two values": halves.clamp(min=1e-2)}


def matrices(m: int, n: int):
    """float32 matrices [m, n], m <= n, with their names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    u, v = torch.linalg.qr(random(m, m))[0], torch.linalg.qr(random(n, m))[0]
    yield "random", random(m, n).float()
    for name, values in spectra(m).items():
        yield name, (u * values @ v.T).float()


def plain(x: torch.Tensor) -> torch.Tensor:
    """The direct iteration in x's dtype, as torch.optim.Muon writes it."""
    x = x / x.norm()
    for a, b, c in dmuon.POLAR_EXPRESS_COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def errors() -> dict[tuple[str, str], list[float]]:
    """By form and by random or not: each matrix's error."""
    found = {}
    for m, n in SHAPES:
        for name, x in matrices(m, n):
            exact = plain(x.double())
            kind = "random" if name == "random" else "other spectra"
            for form, run in {"torch": plain, **FORMS}.items():
                found.setdefault((form, kind), []).append(relative_error(run(x), exact))
    return found


def measure() -> list[Figure]:
    found = run_ranks(errors, 1)[0]
    figures = []
    for (form, kind), each in found.items():
        figures.append(Figure(f"  {form}, {kind}: least error", min(each)))
        figures.append(Figure(f"  {form}, {kind}: largest error", max(each)))
    for form in FORMS:
        for kind in ("random", "other spectra"):
            pairs = zip(found[form, kind], found["torch", kind], strict=True)
            worst = max(ours / torchs for ours, torchs in pairs)
            limit = 2 if (form, kind) in TWICE_TORCH else None
            figures.append(Figure(f"{form}, {kind}: largest ratio to torch's error", worst, limit))
    return figures
