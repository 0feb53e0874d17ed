"""torchtitan's Trainer with dmuon: its llama3 debug model, its schedules, clipping and checkpoints, on gloo."""

import importlib.util
import re
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp

from tests.support import ranks
from tests.support.oracle import Oracle, assert_weights_close
from tests.support.parity import assert_all_raise
from tests.support.titan import (
    LR,
    ROWS,
    STEPS,
    Trained,
    assert_as_one_process,
    assert_near,
    config,
    in_layers,
    run_titan,
    titan,
)
from tests.support.weights import assert_same, full_weights

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip(f"torchtitan needs a newer torch than {torch.__version__}", allow_module_level=True)

HSDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
TP = {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
WO, W1 = "layers.1.attention.wo.weight", "layers.1.feed_forward.w1.weight"
NEVER = {"fsdp_reshard_after_forward": "never", "spmd_backend": "partial_dtensor"}


@pytest.mark.parametrize(
    "world_size, parallelism, accumulate",
    [(2, {}, 1), (2, NEVER, 2), (4, HSDP, 1), (4, TP, 2)],
    ids=["fsdp2", "fsdp2 accumulating", "hsdp", "fsdp2+tp accumulating"],
)
def test_trains_as_one_process_does(world_size, parallelism, accumulate):
    run_titan(check_training, world_size, parallelism, accumulate)


def check_training(rank, world_size, parallelism, accumulate):
    """Its gradients are sums, over ranks and micro-batches, of a loss divided by the tokens of all."""
    shares = world_size // parallelism.get("tensor_parallel_degree", 1)
    training = {"global_batch_size": shares * ROWS * accumulate}
    trained = Trained(config(parallelism=parallelism, training=training)).train()
    assert_as_one_process(trained, ranks=shares, accumulate=accumulate)


def test_compiled_blocks_under_activation_checkpointing():
    run_titan(check_compiled, 2, limit_s=120.0)


def check_compiled(rank, world_size):
    """Each block as one graph, the checkpoint's wrapper included; a graph break would raise."""
    titan()
    from torchtitan.config import CompileConfig

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = CompileConfig(enable=True, backend="eager", components=["model"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "0")  # on_cpu switches it off
        trained = Trained(config(compile=options)).train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0, "nothing was compiled"
    assert_as_one_process(trained, ranks=2)


def test_the_output_head_under_the_loss_in_chunks():
    run_titan(check_head, 2)


def check_head(rank, world_size):
    """It runs eight times a step, each time forward and backward, and is reduced once."""
    with pytest.warns(UserWarning, match="output heads are dedicated"):
        trained = Trained(config(predicate=not_embedded)).train()
    assert_as_one_process(trained, ranks=2, chosen=not_embedded)


def not_embedded(name, p):
    return p.ndim == 2 and "embeddings" not in name


def test_param_groups_by_pattern():
    run_titan(check_groups, 2)


def check_groups(rank, world_size):
    groups = [group("norm", adamw_weight_decay=0.0), group(r"layers\.0", muon_lr=0.1, adamw_lr=0.5)]
    trainer = Trained(config(muon={"param_groups": groups})).trainer
    made = {g["group_name"]: g for g in trainer.optimizers.optimizers[0].param_groups}
    assert list(made) == ["norm/adamw", "layers\\.0/muon", "default/muon", "default/adamw"]
    assert made["norm/adamw"]["weight_decay"] == 0 and len(made["norm/adamw"]["params"]) == 5
    assert made["layers\\.0/muon"]["initial_lr"] == 0.1 and made["default/muon"]["initial_lr"] == LR
    assert made["default/adamw"]["param_names"] == ["tok_embeddings.weight", "lm_head.weight"]


def group(pattern, name="DMuon", **settings):
    titan()
    from torchtitan.components.optimizer import ParamGroupConfig

    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=settings)


# torchtitan's checkpointer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, parallelism, mode",
    [(2, {}, "disabled"), (2, {}, "async"), (4, HSDP, "disabled"), (4, TP, "disabled")],
    ids=["fsdp2", "fsdp2 async", "hsdp", "fsdp2+tp"],
)
def test_a_resumed_run_is_the_same_to_the_bit(world_size, parallelism, mode, tmp_path):
    run_titan(check_resuming, world_size, parallelism, mode, str(tmp_path))


def check_resuming(rank, world_size, parallelism, mode, folder):
    """Also where the Trainer that resumes has other weights to begin with."""
    whole = Trained(saving(folder, mode, parallelism)).train()
    again = Trained(saving(folder, mode, parallelism, load_step=2, debug={"seed": 5}))
    assert not torch.equal(again.start[WO], whole.start[WO])
    again.train()
    assert_same(again.end, whole.end)
    for key in ("step", "loss", "norm", "lr/Muon/0", "lr/Muon/1", "n_tokens_seen"):
        assert again.column(key) == whole.column(key)[2:], key
    if rank == 0:
        check_keys(folder)


def check_keys(folder):
    """By torchtitan's names: the fused projection cut in three, and no wrapper's prefix."""
    keys = set(
        dcp.FileSystemReader(f"{folder}/checkpoint/step-2").read_metadata().state_dict_metadata
    )
    assert {f"layers.1.attention.qkv_linear.w{x}.weight" for x in "qkv"} | {WO} <= keys
    assert f"optimizer.state.{WO}.momentum_buffer" in keys
    assert "optimizer.state.layers.1.attention.qkv_linear.wqkv.weight.momentum_buffer" in keys
    assert {
        f"optimizer.state.norm.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    } <= keys
    assert f"optimizer.param_groups.{WO}.lr" in keys
    assert not any("_checkpoint_wrapped_module" in key for key in keys)


def saving(folder, mode, parallelism, *, debug=None, **checkpoint):
    titan()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.config.configs import DebugConfig

    options = {"enable": True, "interval": 2, "last_save_model_only": False, "async_mode": mode}
    return config(
        folder,
        parallelism=parallelism,
        checkpoint=CheckpointManager.Config(**options | checkpoint),
        debug=DebugConfig(**debug or {}),
    )


def test_the_first_checkpoint_may_come_before_the_first_step(tmp_path):
    run_titan(check_before_a_step, 2, str(tmp_path))


def check_before_a_step(rank, world_size, folder):
    """torchtitan would fill an empty state by a step with gradients of zero; ours is full."""
    first = Trained(saving(folder, "disabled", {}))
    first.trainer.checkpointer.save(0, last_step=True)
    assert_same(full_weights(first.model), first.start)
    again = Trained(saving(folder, "disabled", {}, debug={"seed": 5}))
    again.trainer.checkpointer.load(step=0)
    assert_same(full_weights(again.model), first.start)
    assert first.ns_calls == again.ns_calls == 0


def test_whole_dictionaries_have_torchtitans_names(tmp_path):
    run_titan(check_whole, 2, str(tmp_path))


def check_whole(rank, world_size, folder):
    """The fused projection is cut in three by hooks of its module, on owners and elsewhere."""
    trained = Trained(config())
    model, muon = trained.model, trained.trainer.optimizers.optimizers[0]
    whole = dmuon.get_model_state_dict(model, rank0_only=False)
    plain = trained.trainer.config.model_spec.model.build()
    plain.load_state_dict(whole)
    assert_same(dict(plain.named_parameters()), trained.start)
    state = dmuon.state_dict(model, muon)
    dcp.save({"app": state}, checkpoint_id=folder)
    for p in dmuon.get_owned_params(model, rank):
        p._owned_data.zero_()
    dcp.load({"app": state}, checkpoint_id=folder)
    assert_same(full_weights(model), trained.start)


def test_safetensors_for_hugging_face(tmp_path):
    run_titan(check_hugging_face, 2, str(tmp_path))


def check_hugging_face(rank, world_size, folder):
    """The last save in bfloat16 under Hugging Face's names, read again by another Trainer and by safetensors."""
    last = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    from safetensors.torch import load_file

    trained = Trained(saving(folder, "disabled", {}, **last)).train()
    dist.barrier()
    path = f"{folder}/checkpoint/step-{STEPS}"
    files = [load_file(str(f)) for f in Path(path).glob("*.safetensors")]
    tensors = {name: t for file in files for name, t in file.items()}
    for mine, theirs in ((WO, "self_attn.o_proj"), (W1, "mlp.gate_proj")):
        want = trained.end[mine].bfloat16()
        assert torch.equal(tensors[f"model.layers.1.{theirs}.weight"], want)
    start = {"initial_load_path": path, "initial_load_in_hf": True, "load_only": True}
    again = Trained(saving(f"{folder}/again", "disabled", {}, **start))
    again.trainer.checkpointer.load()
    assert_same(
        full_weights(again.model), {n: w.bfloat16().float() for n, w in trained.end.items()}
    )


# Examples ----------------------------------------------------------------------------------------

SCRIPT = """
import os, runpy, sys
sys.argv = {argv}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
os.environ["LOCAL_RANK"] = os.environ["RANK"]
script = runpy.run_path(sys.argv[0], run_name="__main__")
if {check!r} and os.environ["RANK"] == "0":
    from tests.integrations import test_torchtitan
    getattr(test_torchtitan, {check!r})(script)
"""


def run_example(path, *arguments, check=None):
    argv = [str(ranks.ROOT / "examples" / path), *arguments]
    return ranks.run_fresh(SCRIPT.format(argv=argv, check=check), 2)


def test_the_listing_of_the_specification():
    run_example("spec/torchtitan_dmuon.py", check="hold_listing_against_one_process")


def hold_listing_against_one_process(script):
    exact = one_process_of(script, torch.float64)
    plain = one_process_of(script, torch.float32, ns_backend="gram")
    assert exact.ns_calls == 3 * 2 * 4
    assert_near(script["dataloader"].losses, exact.losses, plain.losses)
    assert_weights_close(script["weights"], exact.weights, plain.weights, 4)


def one_process_of(script, dtype, **options):
    model = script["build_model"](script["config"], ranks=1)
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    named = dict(model.named_parameters())
    chosen = {name for name, p in named.items() if p.ndim == 2 and "proj" in name}
    optimizer, losses = Oracle(model, chosen, lr=0.02, adamw_lr=1e-3, **options), []
    for batch in script["batches"](0, 1):
        loss = model(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: w.detach() for name, w in model.state_dict().items()}
    return SimpleNamespace(losses=losses, weights=weights, ns_calls=optimizer.ns_calls)


def test_the_example_prints_both_losses():
    """Under torchtitan's own initialisation."""
    told, nothing = run_example("torchtitan/train.py", "--steps", "3", "--layers", "1")
    rows = [line.split() for line in told.splitlines()]
    assert rows[0] == ["step", "dmuon", "AdamW"] and [row[0] for row in rows[1:]] == ["1", "2", "3"]
    assert all(float(loss) < 9 for row in rows[1:] for loss in row[1:]) and not nothing


# Mistakes ----------------------------------------------------------------------------------------


def test_mistakes_are_named():
    run_titan(check_mistakes, 2)


def check_mistakes(rank, world_size):
    def built(**changes):
        return lambda: titan().build(config(**changes))

    assert_all_raise(
        built(predicate=lambda name, p: "proj" in name),
        "ValueError",
        "selects no parameter",
        "'layers.*.attention.wo.weight' (2)",
        "'layers.*.feed_forward.w1.weight' (2)",
    )
    assert_all_raise(built(predicate=None), "ValueError", "DMuon", "dedicate(config.model_spec")
    adamw = optimizer("default_adamw", lr=1e-3)
    assert_all_raise(built(optimizer=adamw), "ValueError", "OptimizersContainer", "DMuon(lr=")
    groups = [group("nowhere")]
    assert_all_raise(
        built(muon={"param_groups": groups}), "ValueError", "'nowhere'", "'tok_embeddings.weight'"
    )
    groups = [group("norm", "AdamW", lr=1.0)]
    assert_all_raise(built(muon={"param_groups": groups}), "ValueError", "'AdamW'", "adamw_lr")
    groups = [group("norm", muon_rate=1.0)]
    assert_all_raise(built(muon={"param_groups": groups}), "ValueError", "muon_rate", "muon_lr")


REFUSED = {
    "pipeline_parallel_degree": {"parallelism": {"pipeline_parallel_degree": 2}},
    "context_parallel_degree": {
        "parallelism": {"context_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
    },
    "partial_dtensor": {"parallelism": {"tensor_parallel_degree": 2}},
    "'full_dtensor'": {"parallelism": {"spmd_backend": "full_dtensor"}},
    "disable_cuda_graphs": {"training": {"disable_cuda_graphs": False}},
    "enable_cpu_offload": {"training": {"enable_cpu_offload": True}},
    "training.dtype": {"training": {"dtype": "bfloat16"}},
}


def test_what_is_refused_is_refused_by_name():
    run_titan(check_refused, 2)


def check_refused(rank, world_size):
    for setting, changes in REFUSED.items():
        made = config(**changes)
        if "pipeline" in setting:  # torchtitan calls it on each stage
            dims = SimpleNamespace(pp=2, cp=1, ep=1, tp=1, spmd_backend="spmd_types")
            call = partial(made.model_spec.parallelize_fn, None, parallel_dims=dims)
            call = partial(call, training=made.training, parallelism=made.parallelism)
        else:
            call = partial(titan().build, made)
        assert_all_raise(call, "ValueError", setting)


def test_dedicate_checks_what_it_is_given():
    run_titan(check_dedicate, 2)


def check_dedicate(rank, world_size):
    made = config()
    from dmuon.integrations.torchtitan import dedicate

    with pytest.raises(ValueError, match="given to dedicate already"):
        dedicate(made.model_spec, predicate=in_layers)
    with pytest.raises(TypeError, match="spec is a Config; dedicate takes torchtitan's ModelSpec"):
        dedicate(made, predicate=in_layers)
    plain = config(predicate=None).model_spec
    with pytest.raises(ValueError, match="'replicate_mesh', which torchtitan's ParallelismConfig"):
        dedicate(plain, predicate=in_layers, replicate_mesh=None)


def test_another_torchtitan_is_named():
    run_titan(check_seams, 2)


def check_seams(rank, world_size):
    """What dmuon takes hold of is not there, or torchtitan is not."""
    titan()
    from dmuon.integrations import titan_seams as seams
    from torchtitan.distributed import utils

    spec = "torchtitan.protocols.model_spec"
    for where, what in (
        ((spec, "ModelSpec", "flatten_fn"), f"{spec}.ModelSpec.flatten_fn"),
        ((spec, "Bundle"), f"{spec}.Bundle"),
        (("torchtitan.bundles", "Bundle"), "torchtitan.bundles"),
    ):
        known = rf"has no {re.escape(what)}, .*tested .* 0\.3\.0\. This one is damaged"
        with pytest.raises(ImportError, match=known):
            seams._find(*where)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seams, "version", lambda name: "0.4.0")
            with pytest.raises(ImportError, match=r"torchtitan 0\.4\.0 .*\. Install that version;"):
                seams._find(*where)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(utils, "clip_grad_norm_")
        with pytest.raises(
            ImportError, match=r"has no torchtitan\.distributed\.utils\.clip_grad_norm_"
        ):
            seams.install()
        patch.setattr(seams, "version", no_version)
        with pytest.raises(ImportError, match=r"pip install torchtitan==0\.3\.0"):
            seams.install()
    made = config()
    made.model_spec.parallelize_fn._original = lambda model, **_: (
        model
    )  # without Module.parallelize
    with pytest.raises(ImportError, match=r"has no Module\.parallelize"):
        titan().build(made)


def no_version(name):
    raise PackageNotFoundError(name)


def optimizer(name, **settings):
    titan()
    from torchtitan.components import optimizer

    return getattr(optimizer, name)(**settings)
