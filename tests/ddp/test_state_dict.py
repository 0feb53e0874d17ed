"""Every rank has the whole weights, so saving and loading is DistributedDataParallel's."""

import copy
import io
import warnings
from functools import partial

import dmuon
import pytest
import torch

from tests.support.ddp import BOTH, assert_replicas_equal, by_both, setup_ddp
from tests.support.meshes import SQUARE, flat, on, run_on
from tests.support.models import Net
from tests.support.parity import assert_same, full_weights, three_steps
from tests.support.tp_models import MIXED, subject


def through_a_file(state):
    """As torch.save and torch.load see it: plain tensors only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def another(layout, **options):
    """A run whose weights and momenta are of other steps."""
    run = setup_ddp(layout, **options)
    for step in (10, 11):
        run.train(step)
    return run


# Saving ----------------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3)])
def test_each_rank_saves_what_one_process_loads(layout, by):
    run_on(layout, check_saved, by)


def check_saved(rank, layout, by):
    run = setup_ddp(layout, wrap=BOTH[by])
    three_steps(run)
    state = through_a_file(run.model.state_dict())
    assert_same(state, full_weights(run.model))
    assert_same(state, dmuon.get_model_state_dict(run.model, rank0_only=False))
    plain = Net()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    if by == "DistributedDataParallel":
        assert_same(run.called.state_dict(), {f"module.{name}": w for name, w in state.items()})


def test_tensor_parallel_weights_are_saved_as_dtensors():
    run_on(SQUARE, check_saved_tp)


def check_saved_tp(rank, layout):
    run = setup_ddp(layout, **MIXED)
    three_steps(run)
    state = run.model.state_dict()
    kinds = {name: type(p.data) for name, p in run.model.named_parameters()}
    assert {name: type(value) for name, value in state.items()} == kinds
    whole = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in state.items()}
    assert_same(whole, full_weights(run.model))


# Loading ---------------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3)])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(layout, by):
    run_on(layout, check_resumed, by)


@on([SQUARE])
def test_training_goes_on_from_a_checkpoint_with_tensor_parallelism(layout):
    run_on(layout, check_resumed, "replicate")


def check_resumed(rank, layout, by):
    """Loaded right after a step whose publish may still be in flight."""
    run = setup_ddp(layout, wrap=BOTH[by], **subject(layout))
    three_steps(run)
    weights = {name: v.detach().clone() for name, v in run.model.state_dict().items()}
    optimizer = copy.deepcopy(run.optimizer.state_dict())
    resumed = another(layout, wrap=BOTH[by], **subject(layout))
    dmuon.wait_all_replicate_broadcasts(run.model)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(optimizer)
    assert_replicas_equal(resumed)
    assert_same(full_weights(resumed.model), full_weights(run.model))
    for each in (run, resumed):
        each.train(3)
        each.train(4)
        dmuon.wait_all_replicate_broadcasts(each.model)
    assert_replicas_equal(resumed)
    assert_same(full_weights(resumed.model), full_weights(run.model))


@by_both()
@on([flat(2)])
def test_a_model_reloaded_with_its_own_state_trains_on_as_before(layout, by):
    run_on(layout, check_reloaded, by)


def test_a_tensor_parallel_model_reloaded_with_its_own_state_trains_on_as_before():
    run_on(SQUARE, check_reloaded, "replicate")


def check_reloaded(rank, layout, by):
    runs = [setup_ddp(layout, wrap=BOTH[by], **subject(layout)) for _ in range(2)]
    for run in runs:
        three_steps(run)
    runs[1].called.load_state_dict(runs[1].called.state_dict())
    for run in runs:
        run.train(3)
    assert_same(full_weights(runs[1].model), full_weights(runs[0].model))


def test_a_plain_state_dict_loads_before_the_first_step_and_between_two():
    run_on(flat(3), check_plain_loaded)


def check_plain_loaded(rank, layout):
    torch.manual_seed(99)
    plain = Net()
    fresh, used = setup_ddp(layout), another(layout)
    for run in (fresh, used):
        run.model.load_state_dict(plain.state_dict())
        x, _ = run.batch(0, rank)
        with torch.no_grad():
            assert torch.equal(run.model(x), plain(x))
        assert_same(full_weights(run.model), dict(plain.named_parameters()))
        run.train(0)
        assert_replicas_equal(run)


def test_a_shape_that_does_not_fit_is_named():
    run_on(flat(2), check_shapes)


def check_shapes(rank, layout):
    """A shape that does not fit is named, and nothing of that parameter is loaded."""
    run = setup_ddp(layout)
    three_steps(run)
    before = full_weights(run.model)
    wrong = dict(run.model.state_dict())
    wrong["blocks.0.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight"):
        run.model.load_state_dict(wrong)
    assert_same(full_weights(run.model), before)


def test_a_model_initialised_after_it_was_dedicated_trains_from_those_values():
    run_on(flat(2), check_late_initialisation)


def check_late_initialisation(rank, layout):
    """Those of the first rank; between dedicate_params_ddp and dmuon.Muon weights are ordinary ones."""
    run = setup_ddp(layout, wrap=initialised_then_replicated)
    torch.manual_seed(0)
    want = {n: torch.randn_like(p) for n, p in run.model.named_parameters()}
    assert_replicas_equal(run)
    assert_same(full_weights(run.model), want)
    three_steps(run)
    expected = setup_ddp(layout)
    expected.model.load_state_dict(want)
    three_steps(expected)
    assert_same(full_weights(run.model), full_weights(expected.model))


def initialised_then_replicated(model, mesh):
    torch.manual_seed(mesh.get_local_rank())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the ranks differ
        return dmuon.replicate(model, mesh)


def test_tensor_parallel_weights_written_before_muon_count():
    run_on(SQUARE, check_late_tp)


def check_late_tp(rank, layout):
    """Shards of one replica are written alike, those of the other are not: the first one's count."""
    run = setup_ddp(layout, wrap=partial(scaled_then_replicated, layout), **MIXED)
    plain = setup_ddp(layout, **MIXED)
    assert_replicas_equal(run)
    want = {name: 2 * w for name, w in full_weights(plain.model).items()}
    assert_same(full_weights(run.model), want)


def scaled_then_replicated(layout, model, mesh):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 + layout.data_rank(torch.distributed.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the ranks differ
        return dmuon.replicate_tp(model, mesh)


def test_meta_construction_then_to_empty():
    run_on(flat(2), check_meta)


def check_meta(rank, layout):
    def make():
        with torch.device("meta"):
            return Net()

    def wrap(model, mesh):
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return dmuon.replicate(model, mesh)

    run = setup_ddp(layout, make_model=make, wrap=wrap)
    start = full_weights(run.model)
    assert all(w.isfinite().all() for w in start.values())
    expected = setup_ddp(layout)
    expected.model.load_state_dict(start)
    for each in (run, expected):
        three_steps(each)
    assert_same(full_weights(run.model), full_weights(expected.model))
    assert_replicas_equal(run)
