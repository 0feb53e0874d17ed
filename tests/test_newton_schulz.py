"""The Python functions of Newton-Schulz, against the float64 iteration of the oracle."""

import dmuon
import pytest
import torch

from tests.support import oracle
from tests.support.oracle import relative_error

SHAPES = [(24, 40), (40, 24), (17, 17), (1, 9), (9, 1), (1, 1), (64, 5)]
SETS = {
    "POLAR_EXPRESS_COEFFICIENTS": oracle.POLAR_EXPRESS,
    "YOU_COEFFICIENTS": oracle.YOU,
    "JORDAN_COEFFICIENTS": oracle.JORDAN,
}


def gaussian(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def allowed_error(g, steps=5, coefficients=oracle.POLAR_EXPRESS):
    """Twice what plain torch loses in fp32, in the worse of the two forms."""
    exact = oracle.newton_schulz(g.double(), steps, coefficients)
    forms = (oracle.newton_schulz, oracle.gram_newton_schulz)
    losses = [relative_error(form(g.float(), steps, coefficients), exact) for form in forms]
    return exact, max(2 * max(losses), 1e-6)


@pytest.mark.parametrize("function", ["newton_schulz", "gram_newton_schulz"])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_float64_iteration_to_fp32_accuracy(function, shape):
    g = gaussian(*shape)
    exact, allowed = allowed_error(g)
    got = getattr(dmuon, function)(g)
    assert got.shape == g.shape
    assert relative_error(got, exact) <= allowed


@pytest.mark.parametrize("steps", [1, 3, 5, 7, 12])
@pytest.mark.parametrize("name", list(SETS))
def test_honours_steps_past_the_end_of_each_set(name, steps):
    g = gaussian(12, 20)
    exact, allowed = allowed_error(g, steps, SETS[name])
    got = dmuon.newton_schulz(g, steps=steps, coefficients=getattr(dmuon, name))
    assert relative_error(got, exact) <= allowed


@pytest.mark.parametrize("name", list(SETS))
def test_constants_are_those_of_their_sources(name):
    ours, theirs = (
        torch.tensor(rows, dtype=torch.float64) for rows in (getattr(dmuon, name), SETS[name])
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_a_batch_is_its_matrices():
    g = gaussian(3, 12, 20)
    g[1] *= 1e6
    one_by_one = torch.stack([dmuon.newton_schulz(x) for x in g])
    assert relative_error(dmuon.newton_schulz(g), one_by_one) < 1e-6


def test_does_not_change_its_input():
    g = gaussian(12, 20)
    before = g.clone()
    dmuon.newton_schulz(g)
    dmuon.gram_newton_schulz(g)
    assert torch.equal(g, before)


@pytest.mark.parametrize("factor", [2.0**-90, 2.0**-40, 2.0**40, 2.0**90])
def test_is_free_of_scale(factor):
    g = gaussian(12, 20)
    assert relative_error(dmuon.newton_schulz(g * factor), dmuon.newton_schulz(g)) < 1e-6


def test_commutes_with_transposition_and_permutation():
    g = gaussian(12, 20)
    assert relative_error(dmuon.newton_schulz(g.T), dmuon.newton_schulz(g).T) < 1e-6
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert relative_error(dmuon.newton_schulz(g[rows]), dmuon.newton_schulz(g)[rows]) < 1e-5


def test_zeros_stay_zeros():
    assert torch.equal(dmuon.newton_schulz(torch.zeros(4, 6)), torch.zeros(4, 6))
    g = gaussian(12, 20)
    g[3] = 0
    assert torch.equal(dmuon.newton_schulz(g)[3], torch.zeros(20))


def test_nothing_in_nothing_out():
    assert dmuon.newton_schulz(torch.zeros(0, 5)).shape == (0, 5)
    assert dmuon.newton_schulz(torch.zeros(5, 0)).shape == (5, 0)


def test_takes_bfloat16():
    g = gaussian(12, 20, dtype=torch.bfloat16)
    exact = oracle.newton_schulz(g.double())
    assert relative_error(dmuon.newton_schulz(g), exact) < 5 * torch.finfo(torch.bfloat16).eps


def test_non_contiguous_input_is_read_right():
    g = gaussian(24, 40)[::2, 1::2]
    assert relative_error(dmuon.newton_schulz(g), dmuon.newton_schulz(g.contiguous())) < 1e-6


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2, 2, 2, 2), torch.zeros(())])
def test_refuses_what_is_no_matrix(x):
    with pytest.raises(ValueError, match=r"\[m, n\]"):
        dmuon.newton_schulz(x)


def test_refuses_integers_and_too_few_steps():
    with pytest.raises(ValueError, match="steps"):
        dmuon.newton_schulz(gaussian(3, 4), steps=0)
    with pytest.raises((ValueError, TypeError), match=r"(?i)float|int"):
        dmuon.newton_schulz(torch.ones(3, 4, dtype=torch.int64))


def test_a_backend_object_is_a_value():
    backend = dmuon.NewtonSchulz(backend="direct")
    assert "direct" in repr(backend)
    with pytest.raises(ValueError, match="backend"):
        dmuon.NewtonSchulz(backend="svd")
