"""Muon in plain PyTorch on one process: what every number of the multi-rank tests is held against.

`Oracle` follows design.md section 9 and api.md section 5 to the letter, in the dtype of the model
it is given (float64 is the truth, float32 shows what plain torch loses). It counts its calls of
Newton-Schulz. It shares no code with the package.
"""

import math

import torch

SAFETY = 1.05
POLAR_EXPRESS = [
    (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    for a, b, c in [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]
]
YOU = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
JORDAN = [(3.4445, -4.7750, 2.0315)]


def row(coefficients, step):
    """Polar Express repeats its last row past the end; the other sets cycle."""
    if coefficients is POLAR_EXPRESS:
        return coefficients[min(step, len(coefficients) - 1)]
    return coefficients[step % len(coefficients)]


def newton_schulz(g, steps=5, coefficients=POLAR_EXPRESS):
    """The direct iteration, one `[m, n]` matrix, in the dtype of `g`."""
    x = g.T if g.shape[0] > g.shape[1] else g
    largest = x.abs().max()
    if largest == 0:
        return torch.zeros_like(g)
    x = x / largest
    x = x / x.norm()
    for step in range(steps):
        a, b, c = row(coefficients, step)
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def gram_newton_schulz(g, steps=5, coefficients=POLAR_EXPRESS, restart=2):
    """The same polynomial on the Gram matrix, rebuilt from `x` before step `restart`."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.abs().max()
    x = x / x.norm()
    for first, last in ((0, min(restart, steps)), (restart, steps)):
        gram, factor = x @ x.T, torch.eye(x.shape[0], dtype=x.dtype)
        for step in range(first, last):
            a, b, c = row(coefficients, step)
            m = a * torch.eye(x.shape[0], dtype=x.dtype) + b * gram + c * gram @ gram
            factor, gram = m @ factor, m @ gram @ m
        x = factor @ x
    return x.T if g.shape[0] > g.shape[1] else x


def adjusted_lr(lr, rows, cols, rule):
    if rule == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, cols))
    if rule == "original":
        return lr * math.sqrt(max(1.0, rows / cols))
    if rule == "spectral_unclamped":
        return lr * math.sqrt(rows / cols)
    raise ValueError(rule)


def as_matrices(tensor, view):
    """`[m, n]` matrices of a weight: rows are dim 0 ("flatten"), or leading dims are a batch."""
    if tensor.ndim == 2:
        return [tensor]
    if view == "flatten":
        return [tensor.reshape(tensor.shape[0], -1)]
    return list(tensor.reshape(-1, *tensor.shape[-2:]))


class Oracle(torch.optim.Optimizer):
    """Muon for the parameters named in `muon`, AdamW for the rest, with dmuon.Muon's keywords."""

    def __init__(
        self,
        model,
        muon,
        lr=0.02,
        momentum=0.95,
        weight_decay=0.0,
        ns_steps=5,
        adamw_lr=1e-3,
        adamw_betas=(0.9, 0.999),
        adamw_weight_decay=0.01,
        adamw_eps=1e-8,
        nesterov=True,
        adjust_lr="match_rms_adamw",
        coefficients=POLAR_EXPRESS,
        views=None,
        ns_backend="direct",
    ):
        named = dict(model.named_parameters())
        views = views or {}
        self.views = {
            named[n]: views.get(n, "flatten" if p.ndim == 4 else "batch") for n, p in named.items()
        }
        self.ns_steps, self.adjust_lr, self.coefficients = ns_steps, adjust_lr, coefficients
        self.orthogonalise = newton_schulz if ns_backend == "direct" else gram_newton_schulz
        self.ns_calls = 0
        groups = [
            dict(
                params=[p for n, p in named.items() if n in muon],
                kind="muon",
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                nesterov=nesterov,
            ),
            dict(
                params=[p for n, p in named.items() if n not in muon],
                kind="adamw",
                lr=adamw_lr,
                betas=adamw_betas,
                weight_decay=adamw_weight_decay,
                eps=adamw_eps,
            ),
        ]
        super().__init__([g for g in groups if g["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._muon if group["kind"] == "muon" else self._adamw)(p, group)
        return loss

    def _muon(self, p, group):
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        mu, buf = group["momentum"], state["momentum_buffer"]
        buf.mul_(mu).add_(p.grad)
        update = p.grad + mu * buf if group["nesterov"] else buf
        self.ns_calls += 1
        p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        for w, u in zip(
            as_matrices(p, self.views[p]), as_matrices(update, self.views[p]), strict=True
        ):
            lr = adjusted_lr(float(group["lr"]), *w.shape, self.adjust_lr)
            w.sub_(lr * self.orthogonalise(u, self.ns_steps, self.coefficients))

    def _adamw(self, p, group):
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        (b1, b2), lr = group["betas"], float(group["lr"])
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        denominator = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt() + group["eps"]
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - b1 ** state["step"]))


def relative_error(got, want):
    """Relative Frobenius error, computed in float64."""
    got, want = got.detach().double(), want.detach().double()
    return (got - want).norm().item() / max(want.norm().item(), 1e-30)


def tolerance(steps):
    """The published bound for fp32 weights: 5e-7 after one step, 2e-6 after twenty."""
    return 5e-7 + (2e-6 - 5e-7) * min(max(steps - 1, 0), 19) / 19


def assert_weights_close(got, exact, plain, steps):
    """`got` may miss the float64 weights by the bound, or by twice what plain fp32 torch does."""
    assert set(got) == set(exact), f"names differ: {set(got) ^ set(exact)}"
    for name, want in exact.items():
        error = relative_error(got[name], want)
        allowed = max(tolerance(steps), 2 * relative_error(plain[name], want))
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"
