"""Calls in the wrong order, or on the wrong thing, under ZeRO: they say what to call."""

import copy
import warnings
from functools import partial

import deepspeed
import dmuon
import pytest
import torch
from dmuon.zero import OwnerOptimizer, attach, seams
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import INPUTS, OUTPUTS, in_blocks
from tests.support.parity import assert_all_raise, cpu_mesh
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, ds_config, loss_of, make_engine, train, weights
from tests.zero.test_errors import assert_refused, explicit, initialize, seeded

by_stage = pytest.mark.parametrize("stage", STAGES)


def planned(config, model=None):
    model = seeded() if model is None else model
    plan = dmuon.dedicate_params_zero(model, config, in_blocks)
    return model, plan, OwnerOptimizer(model.parameters(), plan=plan)


@by_stage
def test_the_order_of_calls(stage):
    run_ranks(check_order, 2, stage, limit_s=90)


def check_order(rank, world_size, stage):
    config = ds_config(stage)
    plain = {k: v for k, v in config.items() if k not in ("optimizer", "dmuon")}
    adamw = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    untested = plain | {"zero_allow_untested_optimizer": True}
    # DeepSpeed first.
    model = seeded()
    engine = initialize(model, untested, optimizer=adamw(model))[0]
    dedicate = partial(dmuon.dedicate_params_zero, predicate=in_blocks, ds_config=config)
    for given in (engine, model):
        assert_all_raise(partial(dedicate, given), "ValueError", "dmuon.zero.initialize")
    for call in (dmuon.dedicate_params, dmuon.dedicate_params_ddp):
        for given in (engine, model):
            refused = partial(call, given, cpu_mesh(2), in_blocks)
            assert_all_raise(refused, "ValueError", "dedicate_params_zero")
    # Twice; an optimizer that is not ours; a second one of ours.
    model, plan, optimizer = planned(config)
    assert_refused(model, partial(dedicate, model), "already")
    for wrong in (adamw(model), adamw):
        call = partial(initialize, model, plain, optimizer=wrong)
        assert_refused(model, call, "OwnerOptimizer", "dedicated matrices")
    again = partial(OwnerOptimizer, model.parameters(), plan=plan)
    assert_refused(model, again, "already")
    # Steps before attach.
    engine = initialize(model, plain, optimizer=optimizer)[0]
    assert_all_raise(optimizer.step, "RuntimeError", "attach")
    engine.backward(loss_of(engine, 0))
    assert_all_raise(engine.step, "RuntimeError", "attach(engine, plan)")
    # Attach: another plan, another model, twice, no engine, no plan.
    other = planned(config)  # which keeps the other model
    assert_all_raise(partial(attach, engine, other[1]), "ValueError", "another model")
    assert_all_raise(partial(attach, model, plan), "ValueError", "Net", "deepspeed.initialize")
    assert_all_raise(partial(attach, engine, None), "ValueError", "NoneType")
    assert_all_raise(partial(dmuon.zero.load_dedicated, engine, "x"), "ValueError", "attach")
    model, plan, optimizer = planned(config)
    engine = initialize(model, plain, optimizer=optimizer)[0]
    attach(engine, plan)
    assert_all_raise(partial(attach, engine, plan), "ValueError", "already")
    train(engine, 1)
    # A second engine over the same model.
    call = partial(initialize, engine.module, config)
    assert_all_raise(call, "ValueError", "again")


@by_stage
def test_weights_that_are_replaced(stage):
    run_ranks(check_replaced, 2, stage, limit_s=90)


def check_replaced(rank, world_size, stage):
    """Between the calls, and afterwards, by cast and by hand."""
    plain = ds_config(stage)
    del plain["optimizer"], plain["dmuon"]
    for change in (nn.Module.bfloat16, replace_one):
        model, plan, optimizer = planned(ds_config(stage))
        change(model)
        engine = initialize(model, plain, optimizer=optimizer)[0]
        assert_all_raise(partial(attach, engine, plan), "ValueError", "replaced", "blocks.0")
    # At stage 3 DeepSpeed itself fails first on a parameter that it does not know.
    for change in (lambda m: m.blocks[0].bfloat16(), replace_one)[: 1 if stage == 3 else 2]:
        engine = make_engine(ds_config(stage))
        train(engine, 1)
        change(engine.module)
        assert_all_raise(lambda e=engine: loss_of(e, 0), "ValueError", "blocks.0", "replaced")


def replace_one(model):
    del model.blocks[0].up.weight
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(29, 17))


@by_stage
def test_what_is_for_other_runtimes(stage):
    run_ranks(check_other_runtimes, 2, stage, limit_s=90)


def check_other_runtimes(rank, world_size, stage):
    engine = make_engine(ds_config(stage))
    mesh, model = cpu_mesh(2), engine.module
    for given in (engine, model):
        assert_all_raise(partial(dmuon.Muon, given), "ValueError", "dmuon.zero")
        for call in (dmuon.dedicate_params, dmuon.dedicate_params_ddp):
            assert_all_raise(partial(call, given, mesh, in_blocks), "ValueError", "already")
        assert_all_raise(
            partial(dmuon.replicate, given, mesh), "ValueError", "dedicate_params_zero"
        )
        wrap = partial(DistributedDataParallel, given)
        assert_all_raise(wrap, "ValueError", "dedicate_params_zero")
    for module in (model, model.blocks[0], model.blocks[0].up):
        assert_all_raise(partial(fully_shard, module), "ValueError", "DeepSpeed")
    train(engine, 1)


def test_seams_that_have_changed():
    run_ranks(check_seams, 2, limit_s=90)


SEAMS = {  # stage and changes of the config: where the method is
    "clip_fp32_gradients": (0, {}, lambda engine: engine),
    "unscale_and_clip_grads": (0, {"bf16": {"enabled": True}}, lambda engine: engine.optimizer),
    "scaled_global_norm": (2, {}, lambda engine: engine.optimizer),
    "_get_norm_groups": (3, {}, lambda engine: engine.optimizer),
    "_zero3_consolidated_16bit_state_dict": (3, {}, lambda engine: engine),
}


def check_seams(rank, world_size):
    """Gone, or with other parameters: refused by name, with the version."""
    for name, (stage, changes, owner_of) in SEAMS.items():
        for change in (None, lambda self_or_not, something: None):
            model, plan, optimizer = planned(ds_config(stage, **changes))
            plain = ds_config(stage, **changes)
            del plain["optimizer"], plain["dmuon"]
            engine = initialize(model, plain, optimizer=optimizer)[0]
            setattr(owner_of(engine), name, change)
            words = (name, deepspeed.__version__, "Use DeepSpeed 0.19.8")
            assert_all_raise(partial(attach, engine, plan), "RuntimeError", *words)


def test_another_version_is_announced_once():
    run_ranks(check_version, 2, limit_s=90)


def check_version(rank, world_size):
    version = deepspeed.__version__
    deepspeed.__version__ = "0.99.1+cpu"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                train(make_engine(ds_config(1)), 1)
    finally:
        deepspeed.__version__ = version
        seams._announced.clear()
    texts = [str(w.message) for w in caught if "0.99.1" in str(w.message)]
    assert len(texts) == 1 and "0.19.8" in texts[0], texts


class Tied(nn.Module):
    """The head's weight is the embedding's; two blocks share one, too."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.head = nn.Linear(INPUTS, OUTPUTS)
        self.head.weight = self.inp.weight

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) + self.inp(x)


@by_stage
def test_tied_weights(stage):
    run_ranks(check_tied, 2, stage, limit_s=90)


def check_tied(rank, world_size, stage):
    """Half chosen: an error. Chosen with all its names, or left to DeepSpeed: trained."""
    model = seeded(Tied)
    config = ds_config(stage, dmuon={"include": ["blocks.0"]})
    call = partial(initialize, model, config)
    assert_refused(model, call, "blocks.0.weight", "blocks.1.weight", "one tied weight")
    engine = initialize(model, ds_config(stage))[0]
    before = weights(engine)
    assert set(before) == {"inp.weight", "blocks.0.weight", "head.bias"} | {
        f"blocks.{i}.bias" for i in (0, 1)
    }
    train(engine, 2)
    assert all(not torch.equal(w, before[n]) for n, w in weights(engine).items())
    if stage < 3:
        assert torch.equal(engine.module.blocks[0].weight, engine.module.blocks[1].weight)


def test_models_that_cannot_be_taken():
    run_ranks(check_models, 2, limit_s=90)


def check_models(rank, world_size):
    model, config = seeded(), ds_config(2)
    call = partial(initialize, model, config)
    model.blocks[0].up.weight.use_muon = True
    assert_refused(model, call, "blocks.0.up.weight", "use_muon", "Remove the tag")
    del model.blocks[0].up.weight.use_muon
    model.blocks[0].up.weight.allreduce = False
    assert_refused(model, call, "blocks.0.up.weight", "MoE")
    del model.blocks[0].up.weight.allreduce
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    assert_refused(model, call, "frozen", "blocks.0.down.weight")
    pipe = deepspeed.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1)
    config = ds_config(1, dmuon={"include": ["*"]})
    assert_refused(pipe, partial(initialize, pipe, config), "PipelineModule")
    assert_all_raise(partial(initialize, copy.copy, config), "ValueError", "torch.nn.Module")


def test_groups_of_the_explicit_route():
    run_ranks(check_groups, 2, limit_s=90)


def check_groups(rank, world_size):
    model = seeded()
    blocks = [p for p in model.blocks.parameters() if p.ndim == 2]
    plan = dmuon.dedicate_params_zero(model, ds_config(1), in_blocks)
    for groups, words in (
        ([{"params": blocks, "lr": 0.1}, {"params": model.parameters()}], ["group 0", "no param"]),
        ([{"params": model.parameters(), "lrr": 0.1}], ["group 0", "'lrr'", "'lr'"]),
        ([{"params": model.parameters(), "lr": 0}], ["lr is 0", "above 0"]),
        ([{"params": model.parameters(), "momentum": 2}], ["momentum", "[0, 1)"]),
    ):
        call = partial(OwnerOptimizer, groups, plan=plan)
        assert_all_raise(call, "ValueError", *words)
    call = partial(OwnerOptimizer, model.parameters(), plan=plan, lrate=1)
    assert_all_raise(call, "ValueError", "'lrate'", "unknown")
    engine = explicit(seeded(), ds_config(1))
    train(engine, 1)


def test_deepspeed_fails_and_is_called_again():
    run_ranks(check_again, 2, limit_s=90)


def check_again(rank, world_size):
    """As in a notebook: the model's matrices are dedicated by then."""
    model, config = seeded(), ds_config(2)
    wrong = ds_config(2, train_batch_size=5)
    assert_all_raise(partial(initialize, model, wrong), "AssertionError", "batch")
    other = ds_config(1, dmuon={"include": ["blocks.0.*"]})
    assert_all_raise(partial(initialize, model, other), "ValueError", "Build the model again")
    train(initialize(model, config)[0], 1)
