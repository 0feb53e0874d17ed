import copy

import torch

from tests.support.oracle import (
    JORDAN,
    POLAR_EXPRESS,
    Oracle,
    gram_newton_schulz,
    newton_schulz,
    relative_error,
)


def test_moves_every_singular_value_close_to_one():
    x = newton_schulz(torch.randn(24, 40, dtype=torch.float64))
    values = torch.linalg.svdvals(x)
    assert values.min() > 0.8 and values.max() < 1.2


def test_the_gram_form_is_the_same_polynomial():
    for shape, steps in (((24, 40), 5), ((40, 24), 7), ((9, 9), 2)):
        g = torch.randn(*shape, dtype=torch.float64)
        assert relative_error(gram_newton_schulz(g, steps), newton_schulz(g, steps)) < 1e-12


def test_is_symmetric_under_transposition_and_free_of_scale():
    g = torch.randn(40, 24, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(g.T), newton_schulz(g).T, rtol=0, atol=0)
    torch.testing.assert_close(newton_schulz(g * 2.0**40), newton_schulz(g), rtol=0, atol=0)


def test_muon_is_the_one_of_torch():
    """torch.optim.Muon iterates in bf16: the change may differ by one rounding per iteration."""
    ours = torch.nn.Linear(24, 40, bias=False)
    theirs = copy.deepcopy(ours)
    start, x = ours.weight.detach().clone(), torch.randn(96, 24)
    options = dict(lr=0.02, momentum=0.95, weight_decay=0.1)
    oracle = Oracle(ours, {"weight"}, coefficients=JORDAN, **options)
    reference = torch.optim.Muon(
        theirs.parameters(), ns_coefficients=JORDAN[0], adjust_lr_fn="match_rms_adamw", **options
    )
    for _ in range(3):
        for model, optimizer in ((ours, oracle), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    change, their_change = ours.weight - start, theirs.weight - start
    assert relative_error(change, their_change) < 5 * torch.finfo(torch.bfloat16).eps


def test_the_rest_is_torch_adamw():
    ours = torch.nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    oracle = Oracle(ours, set(), adamw_lr=1e-2)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(3):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, oracle), (theirs, adamw)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-6, atol=1e-7)


def test_a_parameter_without_gradient_is_left_alone():
    model = torch.nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    oracle = Oracle(model, {"weight"}, weight_decay=0.5)
    oracle.step()
    assert oracle.ns_calls == 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_default_coefficients_carry_their_safety_factor():
    assert abs(POLAR_EXPRESS[0][0] - 8.28721201814563 / 1.05) < 1e-15
