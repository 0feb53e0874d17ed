"""The Python functions of Newton-Schulz, against the float64 iteration of the oracle."""

import itertools
import subprocess
import sys

import dmuon
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

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


@pytest.mark.parametrize("steps", [0, -1, 1001, 2**31, 2**70, 2.0, True, "5"])
def test_refuses_steps_that_are_no_count(steps):
    with pytest.raises(ValueError, match=r"ns_steps is .*whole number from 1 to 1000"):
        dmuon.newton_schulz(gaussian(3, 4), steps=steps)


def test_refuses_integers():
    with pytest.raises((ValueError, TypeError), match=r"(?i)float|int"):
        dmuon.newton_schulz(torch.ones(3, 4, dtype=torch.int64))


def test_a_backend_object_is_a_value():
    backend = dmuon.NewtonSchulz(backend="direct")
    assert "direct" in repr(backend)
    with pytest.raises(ValueError, match="backend"):
        dmuon.NewtonSchulz(backend="svd")


@pytest.mark.parametrize(
    "restarts",
    [
        5,
        (1.5,),
        "2",
        b"2",
        (0,),
        (2**40,),
        (True,),
        torch.tensor(2),
        np.array(2),
        itertools.repeat(2.5),
    ],
)
def test_refuses_restarts_that_are_no_steps(restarts):
    with pytest.raises(ValueError, match="restart_iterations"):
        dmuon.NewtonSchulz(restart_iterations=restarts)


@pytest.mark.parametrize(
    "coefficients",
    [[[10**400, 0, 0]], [itertools.repeat(1)], itertools.repeat((1, 0, 0)), 3, "abc"],
)
def test_refuses_coefficients_that_are_no_rows(coefficients):
    with pytest.raises(ValueError, match=r"rows of three numbers|1001 rows"):
        dmuon.NewtonSchulz(coefficients=coefficients)


def test_coefficients_that_flip_only_tiny_singular_values_are_refused():
    rows = [(-1e-6, 1.5, -0.6)] + [(1.5, -0.5, 0)] * 70
    with pytest.raises(ValueError, match="maps a singular value"):
        dmuon.NewtonSchulz(coefficients=rows)


@pytest.mark.parametrize(
    "keyword, value", [("backend", np.array(["gram"])), ("kernel", 3), ("deterministic", [])]
)
def test_refuses_what_is_no_option(keyword, value):
    with pytest.raises(ValueError, match=f"{keyword} is"):
        dmuon.NewtonSchulz(**{keyword: value})


def test_takes_numbers_of_numpy():
    assert dmuon.NewtonSchulz(restart_iterations=np.array([1, 3])).restart_iterations == (1, 3)
    g = gaussian(8, 24)
    assert torch.equal(dmuon.newton_schulz(g, steps=np.int64(5)), dmuon.newton_schulz(g))
    with pytest.raises(ValueError, match="dtype is"):
        dmuon.newton_schulz(g, dtype=[])


def test_restarts_and_coefficients_are_kept_as_tuples():
    """An iterator would be used up by the check, and a list could be changed behind it."""
    backend = dmuon.NewtonSchulz(
        restart_iterations=iter([2, 3]), coefficients=[[3, -3, 1], [2, -1.5, 0.5]]
    )
    assert backend.restart_iterations == (2, 3)
    assert backend.coefficients == ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5))
    assert hash(backend) == hash(
        dmuon.NewtonSchulz(restart_iterations=[2, 3], coefficients=((3, -3, 1), (2, -1.5, 0.5)))
    )


@pytest.mark.parametrize("shape", [(-1, 4), (4, 2**31), (2**70, 2), (1.5, 2)])
def test_a_shape_out_of_range_is_named(shape):
    with pytest.raises(ValueError, match="whole number from 0 to"):
        dmuon.get_ns_backend(*shape)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def stand_ins():
    """Tensors whose elements do not lie where a kernel would look for them."""
    x = gaussian(8, 24)
    yield "freed", freed(x.clone())
    yield "sparse", x.to_sparse()
    yield "nested", torch.nested.nested_tensor([x, x])
    yield "jagged", torch.nested.nested_tensor([x, x], layout=torch.jagged)
    yield "subclass", TwoTensor(x, x)
    yield "float8", x.to(torch.float8_e4m3fn)
    with FakeTensorMode():
        yield "fake", torch.empty(8, 24)


@pytest.mark.parametrize("given", [pytest.param(x, id=name) for name, x in stand_ins()])
@pytest.mark.parametrize("function", ["newton_schulz", "gram_newton_schulz"])
def test_refuses_a_tensor_without_plain_memory(function, given):
    with pytest.raises(ValueError, match="Newton-Schulz got a tensor"):
        getattr(dmuon, function)(given)


def test_refuses_to_run_inside_vmap():
    with pytest.raises((ValueError, RuntimeError), match="Newton-Schulz got a tensor"):
        torch.vmap(dmuon.newton_schulz)(gaussian(3, 8, 24))


def traced_by_jit(x):
    torch.jit.trace(dmuon.newton_schulz, x)


def traced_by_fx(x):
    make_fx(lambda g: dmuon.newton_schulz(g))(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trace", [traced_by_jit, traced_by_fx])
def test_a_trace_is_refused(trace):
    """It would record the buffer, and not what the kernel writes into it."""
    with pytest.raises(ValueError, match="cannot be traced"):
        trace(gaussian(8, 24))


def test_modes_that_only_watch_see_nothing_and_change_nothing():
    x = gaussian(8, 24)
    with FlopCounterMode(display=False) as counted:
        got = dmuon.newton_schulz(x)
    assert torch.equal(got, dmuon.newton_schulz(x))
    assert counted.get_total_flops() == 0


def test_bits_do_not_depend_on_threads_whatever_the_caller_flushes():
    """Threads of a pool would keep the flags that they were started with."""
    x = gaussian(256, 1024)
    x[::2] *= 1e-37
    threads = torch.get_num_threads()
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            results = []
            for count in (1, 2, 2):
                torch.set_num_threads(count)
                results.append(dmuon.gram_newton_schulz(x))
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


FORKS = """
import os, threading, time, torch, dmuon
torch.set_num_threads(2)
x = torch.randn(160, 400)
want = bytes(dmuon.gram_newton_schulz(x).numpy())  # torch.equal would hang in a child's OpenMP
going = True
def work():
    while going:
        dmuon.gram_newton_schulz(x)
thread = threading.Thread(target=work)
thread.start()
for _ in range(60):
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(dmuon.gram_newton_schulz(x).numpy()) == want else 1)
    end = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os._exit(3)  # it hangs, and the thread would keep this process too
        time.sleep(0.001)
    assert done[1] == 0, done
going = False
thread.join()
"""


def test_a_child_of_a_process_that_is_in_it_runs_it_too():
    """No lock of the parent's other threads is in the child's way."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=300)


def test_runs_under_a_mode_of_fake_tensors_as_an_error():
    x = gaussian(8, 24)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match="cannot be traced"),
    ):
        dmuon.newton_schulz(x)


def test_sees_the_sign_of_a_lazily_negated_tensor():
    x = gaussian(8, 24)
    lazy = torch._neg_view(x)
    assert torch.equal(dmuon.newton_schulz(lazy), dmuon.newton_schulz(-x))
