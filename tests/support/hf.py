"""HF Trainer as its users write it, on CPU, and the same training in one process."""

import os

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.oracle import Oracle, assert_weights_close
from tests.support.weights import total
from tests.support.zero import deepspeed_ready, weights

VOCABULARY = 48
ROWS, PER_DEVICE, GAS, CLIP, LR, STEPS = 64, 2, 2, 0.5, 0.02, 4
# Of the learning rate, in each step: one of warm-up, then down to zero.
LINEAR = (0, 1, 2 / 3, 1 / 3)
WARMUP_DECAY = (0, 0, 0.5, 1)


def need(*packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


def hf_ready():
    """As ``trainer_ready``, for DeepSpeed."""
    os.environ |= world()
    deepspeed_ready()
    transformers = trainer_ready()
    from transformers.integrations import deepspeed as integration

    integration.unset_hf_deepspeed_config()
    return transformers


def trainer_ready():
    """The world as torchrun leaves it, without what an earlier test told Accelerate."""
    os.environ |= world()
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_USE", "FSDP_"))]:
        del os.environ[name]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def world():
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    return {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"} | {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }


def rows(count=ROWS, even=False):
    """Unless `even`, of different numbers of labels: a mean over ranks of means is not the mean."""
    g = torch.Generator().manual_seed(3)
    data = []
    for i, ids in enumerate(torch.randint(0, VOCABULARY, (count, 12), generator=g)):
        labels = ids.clone()
        labels[: 0 if even else 5 * i % 9] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


def hf_config(stage, *, include=("*_proj",), zero=None, **changes):
    """The JSON, with all that Trainer and Accelerate fill in."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **(zero or {}),
        },
        "optimizer": {"type": "DMuon", "params": {"lr": "auto", "weight_decay": "auto"}},
        "dmuon": {"include": list(include)},
        **changes,
    }


def make_trainer(config, folder, model=None, trainer=None, **changes):
    """`config` is DeepSpeed's, `trainer` has keywords of Trainer, `changes` of TrainingArguments."""
    from transformers import Trainer, TrainingArguments

    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": PER_DEVICE,
        "gradient_accumulation_steps": GAS,
        "max_steps": STEPS,
        "learning_rate": LR,
        "max_grad_norm": CLIP,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "deepspeed": config,
    }
    arguments = TrainingArguments(**arguments | changes)
    if not isinstance(model, torch.nn.Module):
        model = (model or seeded_llama)()
    data = {"train_dataset": rows(), "eval_dataset": rows(8)}
    return Trainer(model=model, args=arguments, **data, **(trainer or {}))


def llama_config(vocabulary=VOCABULARY):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # attention that is not uniform: gradients of full rank
        use_cache=False,
    )


def seeded_llama():
    from transformers import LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(llama_config())


def lora_llama():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "up_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    model = seeded_llama()
    return get_peft_model(model, config)


def check_adapter(folder, want):
    from safetensors.torch import load_file

    plain = (".default", "modules_to_save.")
    held = {name.replace(plain[0], "").replace(plain[1], ""): w for name, w in want.items()}
    adapter = load_file(f"{folder}/adapter_model.safetensors")
    assert sum("lora_" in name for name in adapter) == 12
    assert_equal(adapter, {name: held[name] for name in adapter})


def projections(name, p):
    return p.ndim == 2 and "_proj" in name


def hand_wrapped(model=None, predicate=projections):
    """As scripts with FSDP2 do it; the model, not its optimizer."""
    model = seeded_llama() if model is None else model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dmuon.dedicate_params(model, mesh, predicate)
    for layer in (m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_one_process(model, muon, factors, *, clip=CLIP, ranks=2, even=False, **options):
    """Steps of the whole batch at once; returns the norms. AdamW follows Muon's schedule."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Oracle(model, muon, lr=LR, **options)
    bases = [group["lr"] for group in optimizer.param_groups]
    data, norms, size = rows(even=even), [], PER_DEVICE * GAS * ranks
    for step, factor in enumerate(factors):
        batch = data[step * size : (step + 1) * size]
        loss_of(model, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * factor
        optimizer.step()
        optimizer.zero_grad()
    return norms


def loss_of(model, batch):
    ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def assert_as_one_process(engine, make_model, factors, norms, *, read=weights, **options):
    """Weights and the norms that were reported; float64 is the truth, float32 what plain torch loses."""
    got, calls = read(engine), total(dmuon.report(engine)["ns_calls"])
    muon = {p.param_name for p in dmuon.get_dedicated_params(engine)}
    if dist.get_rank() != 0:
        return
    exact, plain = make_model().double(), make_model()
    wanted = in_one_process(exact, muon, factors, **options)
    in_one_process(plain, muon, factors, ns_backend="gram", **options)
    assert_weights_close(got, parameters(exact), parameters(plain), len(factors))
    assert norms == approximately(wanted)
    assert calls == len(muon) * len(factors), f"{calls} NS calls in the job"


def approximately(norms):
    return pytest.approx(norms, rel=1e-5)


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def resumed_to_the_bit(run, fresh, read, folder):
    """Saves an ``AcceleratedRun`` in the middle; what it loads itself, and a new one, goes on alike.

    Returns:
        The new one, and its weights at the end, as ``read(model)`` gives them.
    """
    run.accelerator.save_state(folder)
    middle = read(run.model)
    run.train(2, first=2)
    end = read(run.model)
    for other in (run, fresh()):
        other.accelerator.load_state(folder)
        assert_equal(read(other.model), middle)
        other.train(2, first=2)
        assert_equal(read(other.model), end)
    return other, end


def assert_equal(got, want):
    """By name, bit for bit."""
    assert set(got) == set(want), f"names differ: {set(got) ^ set(want)}"
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def saved(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def pairs():
    """Batches of ids and labels, before Accelerate divides them among the ranks."""
    data = [(row["input_ids"], row["labels"]) for row in rows(even=True)]
    return torch.utils.data.DataLoader(data, batch_size=PER_DEVICE)


class AcceleratedRun:
    """The loop of Accelerate's documentation, over what its `prepare` gave: accelerator, model, optimizer,
    loader, scheduler."""

    def train(self, steps, first=0):
        """The norms that `clip_grad_norm_` gives."""
        norms = []
        for i, (x, y) in enumerate(self.loader):
            if not first <= i // GAS < first + steps:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(input_ids=x, labels=y).loss)
                if self.accelerator.sync_gradients:
                    held = self.model.parameters()
                    norms.append(self.accelerator.clip_grad_norm_(held, CLIP))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return norms
