"""Hugging Face Trainer over a model that went through dedicate_params and fully_shard by hand.

Trainer's own methods do the work: training, clipping and accumulation reach dmuon through Accelerate
(``integrations.accelerate``), and what Trainer writes and reads is whole, as one process would have it.
"""

import json
import warnings
from pathlib import Path

import torch

from dmuon.agreement import from_first_rank, is_first, on_every_rank, together
from dmuon.full_optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from dmuon.full_state import get_model_state_dict, set_model_state_dict
from dmuon.groups import world_control_group
from dmuon.integrations import seams
from dmuon.names import first_names
from dmuon.runtime import runtime_of_whole

_WEIGHTS = "model.safetensors"


def attach(trainer) -> None:
    """Check, before anything runs, that ``trainer`` trains, saves and resumes its model through dmuon.

    ``trainer.train()`` does the same by itself; this is for those who want to know when they set up.
    Collective: every rank calls it. Again is fine.

    Raises:
        ValueError: with the same text on every rank: the model of ``trainer`` was not dedicated, its optimizer
            is not the ``dmuon.Muon`` of that model (or was not there yet), or ``trainer`` would shard or
            cast the model itself.
    """
    together(world_control_group(), lambda: _check(trainer))


def _check(trainer) -> None:
    seams.check()
    _check_model(trainer)
    _check_sharding(trainer)
    _check_casts(trainer.args)
    _check_optimizer(trainer)


def _check_model(trainer) -> None:
    model = trainer.model
    runtime = seams.runtime_here(model)
    if runtime is not None:
        runtime_of_whole(model)
        seams.check_sharded(model, runtime)
        return
    other = " Its optimizer is the dmuon.Muon of another one." * (_muon(trainer) is not None)
    raise ValueError(
        f"the model of this Trainer, a {type(model).__name__}, has no dedicated parameters.{other} Give Trainer the "
        "model that dedicate_params and fully_shard got."
    )


def _check_sharding(trainer) -> None:
    runtime = seams.runtime_here(trainer.model)
    if trainer.args.fsdp or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        how = "DeepSpeed" if trainer.is_deepspeed_enabled else f"fsdp={trainer.args.fsdp!r}"
        raise ValueError(
            f'this Trainer would shard the model itself ({how}), and it is sharded already. Set fsdp="" in '
            "TrainingArguments and no deepspeed=, and do not start it with an FSDP or DeepSpeed config of accelerate."
        )
    if runtime.axes.sizes[2] > 1:
        raise ValueError(
            f"the model is cut over {runtime.axes.sizes[2]} tensor-parallel ranks, and Trainer gives each rank data "
            "of its own. Train it with a loop of your own, in which the ranks of one group get the same batches."
        )


def _check_casts(args) -> None:
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True casts the model before evaluate(), and its weights with it. Leave it out; bf16=True "
                "evaluates under autocast."
            )


def _check_optimizer(trainer) -> None:
    runtime, optimizer = seams.runtime_here(trainer.model), trainer.optimizer
    if (
        optimizer is None
        and trainer.optimizer_cls_and_kwargs is None
        and trainer.model_init is None
    ):
        raise ValueError(
            "this Trainer has no optimizer, and one of its own would train placeholders. Make dmuon.Muon(model) "
            "first and give Trainer optimizers=(optimizer, None), or optimizer_cls_and_kwargs=(lambda: dmuon.Muon, "
            '{"lr": 0.02}).'
        )
    if optimizer is not None and (
        _muon(trainer) is None or runtime.optimizer() is not _muon(trainer)
    ):
        kind = type(optimizer).__name__ if _muon(trainer) is None else "dmuon.Muon of another model"
        raise ValueError(
            f"the optimizer of this Trainer is a {kind}; it must be the dmuon.Muon of its model. Give Trainer "
            "optimizers=(dmuon.Muon(model), None)."
        )


def _muon(trainer):
    return seams.muon_of(trainer.optimizer)


def _train(original, self, *args, **kwargs):
    if seams.runtime_here(self.model) is not None or _muon(self) is not None:
        attach(self)
    return original(self, *args, **kwargs)


def _create_optimizer(original, self, *args, **kwargs):
    """By name it is known only now."""
    optimizer = original(self, *args, **kwargs)
    if seams.runtime_here(self.model) is not None:
        attach(self)
    return optimizer


def _move_model_to_device(original, self, model, device):
    """Placement is FSDP2's and dmuon's, before Trainer has the model."""
    if seams.runtime_here(model) is None:
        return original(self, model, device)
    there, wanted = {p.device.type for p in model.parameters()}, torch.device(device).type
    if there != {wanted}:
        raise ValueError(
            f"this {type(model).__name__} is on {', '.join(sorted(there))}, and Trainer runs on {wanted}. Move it "
            "there before dedicate_params, with a mesh of that device."
        )


def _has_mixed_mesh_grads(original, self, model):
    """Then Trainer would take one norm for each mesh, and another way on ranks that own no matrix."""
    return seams.runtime_here(model) is None and original(self, model)


def _save(original, self, output_dir=None, state_dict=None):
    runtime = seams.runtime_here(self.model)
    if runtime is None:
        return original(self, output_dir, state_dict)
    if state_dict is None:
        state_dict = get_model_state_dict(self.model, rank0_only=not self.args.save_on_each_node)
    return on_every_rank(runtime, lambda: original(self, output_dir, state_dict))


def _save_optimizer_and_scheduler(original, self, output_dir):
    runtime = seams.runtime_here(self.model)
    if runtime is None:
        return original(self, output_dir)
    first_alone = not self.args.save_on_each_node
    state = get_optimizer_state_dict(self.model, _muon(self), rank0_only=first_alone)
    on_every_rank(runtime, lambda: _write(self, state, *_files(output_dir)))


def _write(trainer, state: dict, optimizer: Path, scheduler: Path) -> None:
    if trainer.args.should_save:
        torch.save(state, optimizer)
        torch.save(trainer.lr_scheduler.state_dict(), scheduler)


def _files(folder) -> tuple[Path, Path]:
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

    return Path(folder, OPTIMIZER_NAME), Path(folder, SCHEDULER_NAME)


def _load_from_checkpoint(original, self, resume_from_checkpoint, model=None):
    runtime = seams.runtime_here(self.model)
    if runtime is None:
        return original(self, resume_from_checkpoint, model)
    folder = Path(resume_from_checkpoint)
    read = (lambda: _read(self.model, folder)) if is_first(runtime) else dict
    set_model_state_dict(self.model, on_every_rank(runtime, read))


def _load_best_model(original, self):
    if seams.runtime_here(self.model) is None:
        return original(self)
    return self._load_from_checkpoint(self.state.best_model_checkpoint)


def _read(model, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` wrote, in one file or several. It leaves out all but one of tied names."""
    from safetensors.torch import load_file

    index = folder / f"{_WEIGHTS}.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    else:
        raise ValueError(
            f"{folder} has no {_WEIGHTS}, and no {index.name}. (A checkpoint of a PEFT adapter: load it into the model "
            "before dedicate_params.)"
        )
    values = {name: t for file in files for name, t in load_file(folder / file).items()}
    first = first_names(model)
    by_first = {first.get(name, name): t for name, t in values.items()}
    tied = {name: by_first[one] for name, one in first.items() if one in by_first}
    return {**tied, **values}


def _load_optimizer_and_scheduler(original, self, checkpoint):
    runtime = seams.runtime_here(self.model)
    if runtime is None or checkpoint is None:
        return original(self, checkpoint)
    files = _files(checkpoint)
    if not from_first_rank(runtime, lambda: all(file.is_file() for file in files)):
        warnings.warn(
            f"{checkpoint} has no {files[0].name} and {files[1].name} (save_only_model?): the optimizer starts "
            "anew, from the weights.",
            stacklevel=2,
        )
        return
    optimizer, scheduler = ((lambda f=file: torch.load(f, map_location="cpu")) for file in files)
    state = on_every_rank(runtime, optimizer if is_first(runtime) else dict)
    set_optimizer_state_dict(self.model, _muon(self), state)
    self.lr_scheduler.load_state_dict(from_first_rank(runtime, scheduler))


def _save_pretrained(
    original, self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs
):
    """Often called on one rank alone, so that it cannot gather what the others have."""
    runtime = seams.runtime_here(self)
    if state_dict is None and runtime is not None and not runtime.resident:
        raise ValueError(
            f"save_pretrained of a {type(self).__name__} whose dedicated parameters lie on one rank each, without "
            "state_dict=. On all ranks: whole = dmuon.get_model_state_dict(model); then on the first one: "
            "model.save_pretrained(folder, state_dict=whole). (Trainer.save_model and accelerator.get_state_dict do "
            "it.)"
        )
    return original(self, save_directory, is_main_process, state_dict, *args, **kwargs)


OF_MODELS = {"save_pretrained": _save_pretrained}
PUBLIC = {"train": _train, "create_optimizer": _create_optimizer}
PRIVATE = {
    "_move_model_to_device": _move_model_to_device,
    "_has_mixed_mesh_grads": _has_mixed_mesh_grads,
    "_save": _save,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
    "_load_from_checkpoint": _load_from_checkpoint,
    "_load_best_model": _load_best_model,
    "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
}
