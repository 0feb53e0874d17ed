"""Trainer set up the wrong way: one error on all ranks, before the first step, that says what to do."""

import os

import dmuon
import pytest
import torch
from dmuon.integrations import accelerate, hf, seams

from tests.support.hf import (
    hand_wrapped,
    make_trainer,
    need,
    projections,
    seeded_llama,
    trainer_ready,
)
from tests.support.parity import assert_all_raise, cpu_mesh
from tests.support.ranks import run_fresh, run_ranks

need("transformers", "accelerate")


def test_wrong_setups(tmp_path):
    run_ranks(check_setups, 2, str(tmp_path), limit_s=90)


def check_setups(rank, world_size, folder):
    trainer_ready()
    model = hand_wrapped()

    def refused(trainer, *words):
        text = assert_all_raise(lambda: hf.attach(trainer), "ValueError", *words)
        assert assert_all_raise(trainer.train, "ValueError") == text

    refused(make_trainer(None, folder, model), "no optimizer", "optimizers=(optimizer, None)")
    adamw = torch.optim.AdamW(model.parameters())
    refused(with_optimizer(folder, model, adamw), "is a AdamW", "dmuon.Muon of its model")
    named = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})}
    trainer = make_trainer(None, folder, model, trainer=named)
    assert_all_raise(trainer.train, "ValueError", "is a AdamW", "dmuon.Muon of its model")
    optimizer = dmuon.Muon(model)
    trainer_ready()
    refused(
        with_optimizer(folder, seeded_llama(), optimizer), "another one", "that dedicate_params"
    )
    trainer_ready()
    other = hand_wrapped()
    refused(with_optimizer(folder, other, optimizer), "dmuon.Muon of another model")
    refused(with_optimizer(folder, model, optimizer, fsdp="full_shard"), "itself", 'fsdp=""')
    cast = with_optimizer(folder, model, optimizer, bf16_full_eval=True)
    refused(cast, "bf16_full_eval=True casts", "bf16=True evaluates under autocast")
    half = seeded_llama()
    dmuon.dedicate_params(half, cpu_mesh(world_size), projections)
    refused(with_optimizer(folder, half, dmuon.Muon(half)), "Call fully_shard")
    meta = hand_wrapped(on_meta())
    call = lambda: make_trainer(None, folder, meta)  # noqa: E731
    assert_all_raise(call, "ValueError", "is on meta, and Trainer runs on cpu", "Move it")
    fine = with_optimizer(folder, model, optimizer, max_steps=1)
    hf.attach(fine)
    hf.attach(fine)
    fine.train()


def on_meta():
    with torch.device("meta"):
        return seeded_llama()


def with_optimizer(folder, model, optimizer, **changes):
    trainer = {"optimizers": (optimizer, None)}
    return make_trainer(None, folder, model, trainer=trainer, **changes)


def test_before_there_is_a_process_group():
    says = r"no process group yet.*Call torch.distributed.init_process_group\(\) first"
    with pytest.raises(ValueError, match=says):
        hf.attach(None)
    with pytest.raises(ValueError, match=says):
        accelerate.prepare(None, None, projections)


def test_one_rank_alone(tmp_path):
    run_ranks(check_one_rank, 2, str(tmp_path), limit_s=90)


def check_one_rank(rank, world_size, folder):
    trainer_ready()
    model = hand_wrapped()
    optimizer = dmuon.Muon(model)
    trainer = with_optimizer(folder, model, optimizer)
    if rank == 1:
        trainer.optimizer = torch.optim.SGD(model.parameters())
    assert_all_raise(trainer.train, "ValueError", "is a SGD")


def test_processes_that_accelerate_does_not_know_of(tmp_path):
    run_ranks(check_processes, 2, str(tmp_path), limit_s=90)


def check_processes(rank, world_size, folder):
    """On a machine without accelerators it counts one, where nobody says that CPUs are meant."""
    trainer_ready()
    model = hand_wrapped()
    assert os.environ["ACCELERATE_USE_CPU"] == "true" or torch.accelerator.is_available()
    os.environ["ACCELERATE_USE_CPU"] = "false"
    trainer = with_optimizer(folder, model, dmuon.Muon(model), use_cpu=False)
    assert_all_raise(trainer.train, "ValueError", "counts 1 processes", "use_cpu=True")


def test_versions_that_dmuon_does_not_know(monkeypatch):
    """A method that is gone, and one that nobody calls any more."""
    monkeypatch.setattr(seams, "_originals", {})
    monkeypatch.setattr(seams, "_lost", {})
    known = {name: lambda self: None for name in (*hf.PUBLIC, *hf.PRIVATE) if name != "_save"}
    methods = [f"self.{name}()" for name in hf.PRIVATE if name != "_load_best_model"]
    known["train"] = eval(f"lambda self: [{', '.join(methods)}]")
    for more, says in (
        ({}, "does not have; tested: transformers 5.24"),
        (
            {"_save": lambda self: None},
            "dmuon relies on Trainer._load_best_model, which transformers",
        ),
    ):
        trainer = type("Trainer", (), {"__module__": "transformers.trainer", **known, **more})
        seams._lost.clear()
        seams.wrap(trainer, hf.PUBLIC, hf.PRIVATE)
        with pytest.raises(RuntimeError, match="Install that version") as error:
            seams.check()
        assert says in str(error.value)


def test_nothing_heavy_is_imported_with_dmuon():
    (printed,) = run_fresh(LIGHT, 1)
    assert printed.split() == ["[]", "wrapped", "original"]


LIGHT = """
import sys
import dmuon, dmuon.integrations, dmuon.integrations.hf, dmuon.integrations.accelerate
print([name for name in ("transformers", "accelerate", "deepspeed") if name in sys.modules])
from transformers import Trainer
print("wrapped" if hasattr(Trainer._save, "__wrapped__") else "original")
dmuon.uninstall_patch()
print("wrapped" if hasattr(Trainer._save, "__wrapped__") else "original")
"""


def test_the_installed_versions_are_the_ones_the_docs_name():
    from importlib.metadata import version

    import accelerate.accelerator
    import transformers.trainer

    for package, tested in seams.TESTED.items():
        assert version(package).startswith(tested + ".")
    seams.check()
    assert hasattr(transformers.trainer.Trainer._save, "__wrapped__")
    assert hasattr(accelerate.accelerator.Accelerator.prepare, "__wrapped__")
