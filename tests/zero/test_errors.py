"""What does not go together under ZeRO: one text on every rank, before anything has changed."""

import copy
import json
from functools import partial

import dmuon
import pytest
import torch
from dmuon.zero.config import DsConfig
from torch import nn

from tests.support.models import INPUTS, OUTPUTS, Net, in_blocks
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks
from tests.support.zero import chosen_by, deepspeed_ready, ds_config, train, weights


def seeded(make=Net):
    torch.manual_seed(7)
    return make()


def assert_refused(model, call, *words, kind="ValueError"):
    """`call` raises on all ranks with one text, and the model is as it was."""
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    text = assert_all_raise(call, kind, *words)
    for name, p in model.named_parameters():
        same, value = before.pop(name)
        assert id(p) == same and torch.equal(p, value), f"{name} changed"
    assert not before, f"{list(before)} are gone"
    return text


def initialize(model, config, **keywords):
    return deepspeed_ready().initialize(model=model, config=config, **keywords)


def config_with(*path, to, stage=2):
    config = copy.deepcopy(ds_config(stage))
    node = config
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = to
    return config


# Settings ----------------------------------------------------------------------------------------

ZERO = "zero_optimization"
EVERYTHING = {"include": ["*"], "min_ndim": 1, "routes": {"adamw": ["*.bias", "*.norm.weight"]}}
SETTINGS = (  # path, value, what the error says
    (("optimizer", "type"), "Muon", ["'Muon'", "DMuon"]),
    (("optimizer", "type"), "AdamW", ["'AdamW'", "DMuon"]),
    ((ZERO, "stage"), 4, ["stage is 4", "0, 1, 2 or 3"]),
    ((ZERO, "stage"), "auto", ["zero_optimization.stage", "auto"]),
    (("bf16", "enabled"), "auto", ["bf16.enabled", "auto"]),
    ((ZERO, "contiguous_gradients"), False, ["contiguous_gradients", "Drop"]),
    ((ZERO, "zenflow"), {"topk_ratio": 0.1}, ["zenflow"]),
    ((ZERO, "elastic_checkpoint"), True, ["elastic_checkpoint"]),
    ((ZERO, "mics_shard_size"), 2, ["mics_shard_size", "zero_hpz"]),
    ((ZERO, "offload_optimizer"), {"device": "nvme"}, ["NVMe", '"cpu"']),
    ((ZERO, "offload_param"), {"device": "nvme"}, ["NVMe", '"cpu"']),
    ((ZERO, "offload_optimizer"), {"device": "cpu", "super_offload": True}, ["super_offload"]),
    ((ZERO, "offload_optimizer"), {"device": "cpu", "ratio": 0.5}, ["ratio", "Drop the key"]),
    (("sparse_gradients",), True, ["sparse_gradients"]),
    (("amp",), {"enabled": True}, ["amp", "bf16"]),
    (("torch_autocast",), {"enabled": True, "dtype": "half"}, ["torch_autocast", "bfloat16"]),
    (("compile",), {"deepcompile": True}, ["deepcompile"]),
    (("hybrid_engine",), {"enabled": True}, ["hybrid_engine"]),
    (("tensor_parallel",), {"autotp_size": 2}, ["Tensor parallelism"]),
    (("sequence_parallel_size",), 2, ["sequence"]),
    (("data_types",), {"buffer_dtype": "bf16"}, ["buffer_dtype"]),
    (("communication_data_type",), "fp8", ["communication_data_type", "fp16"]),
    (("optimizer", "params"), {"momentun": 0.9}, ["'momentun'", "'momentum'"]),
    (("optimizer", "params"), {"betas": [0.9, 0.99]}, ["'betas'", "'adamw_betas'"]),
    (("optimizer", "params"), {"lr": "auto"}, ["optimizer.params.lr", "auto"]),
    (("optimizer", "params"), {"lr": 0.0}, ["lr is 0.0", "above 0"]),
    (("optimizer", "params"), {"lr": "fast"}, ["lr", "'fast'", "number"]),
    (("optimizer", "params"), {"momentum": 1.5}, ["momentum", "1.5", "[0, 1)"]),
    (("optimizer", "params"), {"adamw_betas": [0.9]}, ["betas", "two numbers"]),
    (("optimizer", "params"), [1], ["optimizer.params is [1]"]),
    (("dmuon",), ["blocks.*"], ["a section", "include"]),
    (("dmuon",), {"exclude": []}, ['no "include"', "For this model"]),
    (("dmuon", "inclde"), ["x"], ["'inclde'", "'include'"]),
    (("dmuon", "mesh"), 2, ["'mesh'", "unknown"]),
    (("dmuon", "include"), ["*_proj"], ["'*_proj'", "matches no parameter", "blocks.0.up"]),
    (("dmuon", "exclude"), ["*.gate"], ["'*.gate'", "matches no parameter"]),
    (("dmuon", "include"), ["*.bias"], ["selects no parameter", "min_ndim"]),
    (("dmuon", "include"), 3, ["list of globs"]),
    (("dmuon", "min_ndim"), "2", ["whole number"]),
    (("dmuon", "routes"), {"adam": ["*"]}, ["'adam'", "'adamw'"]),
    (("dmuon", "routes"), {"adamw": ["*.gate"]}, ["*.gate", "matches no"]),
    (("dmuon", "pack_small_params"), "yes", ["pack_small_params", "true or false"]),
    (("dmuon", "param_policy"), "bf16", ["param_policy", "defaults"]),
    (("dmuon", "compute_dtype"), "int8", ["compute_dtype", "int8"]),
    (("dmuon", "owner_strategy"), "best", ["owner_strategy", "lpt"]),
    (("dmuon",), EVERYTHING, ["nothing to train", "an embedding, a norm, a bias"]),
)


@pytest.mark.parametrize(
    ("config", "words"),
    [("nowhere.json", "does not exist"), ("{", "not JSON"), (3, "int"), ({}, "init_distributed")],
)
def test_a_config_that_cannot_be_read(config, words, tmp_path):
    """The last one can, and there are no ranks."""
    if config == "{":
        config = tmp_path / "ds_config.json"
        config.write_text("{")
    with pytest.raises(ValueError, match=words):
        DsConfig.read(config)
        dmuon.dedicate_params_zero(Net(), config, in_blocks)


def test_settings():
    run_ranks(check_settings, 2, limit_s=90)


def check_settings(rank, world_size):
    model = seeded()
    for path, value, words in SETTINGS:
        assert_refused(model, partial(initialize, model, config_with(*path, to=value)), *words)
    no_ups = [p for n, p in model.named_parameters() if not n.endswith("up.weight")]
    leaves_out = partial(initialize, model, ds_config(1), model_parameters=no_ups)
    assert_refused(model, leaves_out, "model_parameters leaves", "blocks.0.up.weight")
    robin = ds_config(2, zero={"round_robin_gradients": True})
    assert_refused(model, partial(initialize, model, robin), "round_robin_gradients", "Drop")
    fp16 = ds_config(0, fp16={"enabled": True})
    assert_refused(model, partial(initialize, model, fp16), "fp16 at stage 0", "bf16")
    divided = ds_config(3, gradient_predivide_factor=2.0, zero={"reduce_scatter": False})
    assert_refused(
        model, partial(initialize, model, divided), "gradient_predivide_factor at stage 3"
    )
    config = ds_config(1)
    assert_refused(model, partial(initialize, model, config, mpu=object()), "mpu")
    train(initialize(model, ds_config(1))[0], 1)


def test_a_section_to_paste():
    run_ranks(check_paste, 2, limit_s=90)


def check_paste(rank, world_size):
    """What the error shows is JSON for this model, and trains what it says it selects."""
    config, model = ds_config(1), seeded()
    del config["dmuon"]
    text = assert_refused(model, partial(initialize, model, config), 'no "dmuon" section')
    pasted = text[text.index('"dmuon": {"') :].partition(", which selects ")
    config |= json.loads("{" + pasted[0] + "}")
    engine = initialize(model, config)[0]
    assert chosen_by(engine) == {n.strip(" '.") for n in pasted[2].split(",")}
    before = weights(engine)
    train(engine, 1)
    assert all(not torch.equal(w, before[name]) for name, w in weights(engine).items())
    plain = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    del config["dmuon"]
    assert_refused(plain, partial(initialize, plain, config), 'no "dmuon" section', "include")


def test_ranks_that_differ():
    run_ranks(check_ranks_differ, 2, limit_s=90)


def check_ranks_differ(rank, world_size):
    model, ready = seeded(), deepspeed_ready()
    mine = lambda n, p: f"blocks.{rank}.up.weight" == n  # noqa: E731
    for stage in (1, 3):
        call = partial(dmuon.dedicate_params_zero, model, ds_config(stage), mine)
        assert_refused(model, call, "same parameters", "blocks.0.up.weight")
    with ready.zero.Init(config_dict_or_path=ds_config(3)):
        cut = seeded()
    call = partial(dmuon.dedicate_params_zero, cut, ds_config(3), mine)
    assert_refused(cut, call, "same parameters", "blocks.0.up.weight")
    for changes in ({"clip": float(rank)}, {"dmuon": {"include": [f"blocks.{rank}.*"]}}):
        call = partial(ready.initialize, model=model, config=ds_config(1, **changes))
        assert_refused(model, call, "same DeepSpeed config")
    call = partial(ready.initialize, model=model, config=ds_config(1 + rank))
    assert_refused(model, call, "zero_optimization.stage")
    bad = config_with("optimizer", "type", to="AdamW") if rank else ds_config(2)
    assert_refused(model, partial(ready.initialize, model=model, config=bad), "'AdamW'")
    bad = config_with("dmuon", "inclde", to=[]) if rank else ds_config(2)
    call = partial(dmuon.dedicate_params_zero, model, bad)
    assert_refused(model, call, "'inclde'")
    lr = 0.01 * (1 + rank)
    engine = explicit(model, ds_config(1), lr=lr)
    assert_all_raise(partial(train, engine, 1), "ValueError", "different learning rates")


def explicit(model, config, lr=0.02):
    """The three calls, step by step."""
    plan = dmuon.dedicate_params_zero(model, config, in_blocks)
    optimizer = dmuon.zero.OwnerOptimizer(model.parameters(), plan=plan, lr=lr)
    engine = initialize(model, config, optimizer=optimizer)[0]
    dmuon.zero.attach(engine, plan)
    return engine
