"""docs/learning_rates.md: its table, and what it says one rate is worth under another rule."""

import re
from math import sqrt

import dmuon
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim._muon import _adjust_lr as torchs

from tests.support.ranks import ROOT, run_ranks

PAGE = (ROOT / "docs" / "learning_rates.md").read_text()
ROW = re.compile(r"^\| (\d+) x (\d+) \|" + r" ([\d.]+) \|" * 6, re.MULTILINE)
SHAPES = [(48, 48), (96, 24), (24, 96)]
OTHERS = {
    "original": lambda m, n: 5 / sqrt(n),
    "spectral_unclamped": lambda m, n: 5 / sqrt(n) * min(1, sqrt(m / n)),
}


def test_the_table_is_torchs_rules():
    rows = ROW.findall(PAGE)
    assert len(rows) == 8
    for row in rows:
        shape, printed = (int(row[0]), int(row[1])), [float(number) for number in row[2:]]
        original, rms, spectral = (
            torchs(1.0, rule, shape)
            for rule in ("original", "match_rms_adamw", "spectral_unclamped")
        )
        expected = [original, rms, spectral, original / rms, spectral / rms, 1 / rms]
        assert printed == pytest.approx(expected, rel=5e-4), shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", OTHERS)
def test_the_factor_of_the_page_is_the_quotient_of_the_rules(rule, shape):
    wanted = torchs(1.0, rule, shape) / torchs(1.0, "match_rms_adamw", shape)
    assert OTHERS[rule](*shape) == pytest.approx(wanted, rel=1e-12)


def test_a_converted_rate_and_decay_train_alike():
    run_ranks(check_converted, 1)


def check_converted(rank, world_size):
    for shape in SHAPES:
        for rule, factor in OTHERS.items():
            c = factor(*shape)
            theirs = trained(shape, adjust_lr=rule, lr=0.03, weight_decay=0.2)
            ours = trained(shape, lr=0.03 * c, weight_decay=0.2 / c)
            # The same numbers multiplied in another order: a few roundings in each of three steps.
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
            plain = trained(shape, lr=0.03, weight_decay=0.2)
            assert (plain - theirs).norm() > 1e-3 * theirs.norm(), "the factor matters"


def trained(shape, steps=3, **options):
    """The weight after a few steps of its own gradients."""
    torch.manual_seed(1)
    model = nn.Linear(shape[1], shape[0], bias=False)
    mesh = init_device_mesh("cpu", (1,))
    dmuon.dedicate_params_ddp(model, mesh, predicate=lambda name, p: True)
    optimizer = dmuon.Muon(model, **options)
    x, y = torch.randn(200, shape[1]), torch.randn(200, shape[0])
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return dmuon.get_model_state_dict(model)["weight"]


@pytest.mark.parametrize("shape", [(256, 256), (512, 128), (128, 512)])
def test_an_update_has_the_size_that_the_page_says(shape):
    """Root mean square of the orthogonalised matrix: 1 / sqrt(max(m, n)), within what five steps reach."""
    torch.manual_seed(2)
    rms = dmuon.newton_schulz(torch.randn(shape)).square().mean().sqrt().item()
    assert 0.846 <= rms * sqrt(max(shape)) <= 1.124
