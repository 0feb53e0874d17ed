"""What scripts do with `model.state_dict()`: each is right, or an error that names the call to use."""

import copy
import io

import dmuon
import pytest
import torch

from tests.checkpoints.kinds import assert_same, start, train, whole
from tests.support.ranks import run_ranks
from tests.support.tp_models import VOCABULARY

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
CALL = r"dmuon\.get_model_state_dict"


def right_or_refused(make, want):
    """Calls it; its result must be `want` of it, or the error names the call."""
    try:
        got = make()
    except RuntimeError as error:
        assert "dmuon.get_model_state_dict" in str(error), error
        return "refused"
    assert_same(got, {name: want[name] for name in got})
    return "right"


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_copies_of_a_state_dict_are_right_or_refused(kind):
    """On DDP every rank has everything; on FSDP2 some weights lie elsewhere."""
    told = run_ranks(check_copies, 2, kind)
    assert {t for rank in told for t in rank} == ({"right"} if kind == "ddp" else {"refused"})


def check_copies(rank, world_size, kind):
    run = start(kind)
    train(run, 0, 2)
    dmuon.wait_all_replicate_broadcasts(run.model)
    want = dmuon.get_model_state_dict(run.model, rank0_only=False)

    def state():
        names = {p.fqn for p in dmuon.get_dedicated_params(run.model)}
        return {n: v.detach() for n, v in run.model.state_dict().items() if n in names}

    def through_a_file():
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def by_safetensors():
        from safetensors.torch import load, save

        return load(save(state()))

    return [
        right_or_refused(make, want)
        for make in (
            through_a_file,
            by_safetensors,
            lambda: {n: v.clone() for n, v in state().items()},  # the start of a moving average
            lambda: {n: torch.zeros_like(want[n]).add_(v) for n, v in state().items()},
            lambda: {n: v.double().float() for n, v in state().items()},
            lambda: {n: torch.tensor(v.tolist()) for n, v in state().items()},
            lambda: {n: torch.from_numpy(v.numpy()) for n, v in state().items()},
        )
    ]


def test_a_deep_copy_of_a_state_dict_loads_again():
    run_ranks(check_deep_copy, 2)


def check_deep_copy(rank, world_size):
    run = start("fsdp2")
    train(run, 0, 2)
    want = whole(run)
    model = copy.deepcopy(run.model.state_dict())
    optimizer = copy.deepcopy(run.optimizer.state_dict())
    train(run, 2, 4)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    assert_same(whole(run), want)


# Hugging Face ----------------------------------------------------------------------------------


def tiny_llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


LLAMA = {
    "make_model": tiny_llama,
    "predicate": lambda name, p: "proj" in name and p.ndim == 2,
    "sample": lambda g: (torch.randint(VOCABULARY, (96, 4), generator=g),) * 2,
    "criterion": lambda model, x, y: model(input_ids=x, labels=y).loss,
}


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_save_pretrained_saves_the_whole_model_or_refuses(kind, tmp_path):
    run_ranks(check_pretrained, 2, kind, str(tmp_path))


def check_pretrained(rank, world_size, kind, root):
    options = LLAMA | ({"wrap": shard_layers} if kind == "fsdp2" else {})
    run = start(kind, options)
    train(run, 0, 2)
    want = dmuon.get_model_state_dict(run.model, rank0_only=False)
    if kind == "ddp":
        run.model.save_pretrained(f"{root}/{rank}")
        if rank == 0:  # the only one that transformers lets write
            assert_same(pretrained(f"{root}/{rank}"), want)
    else:
        with pytest.raises(ValueError, match=rf"{CALL}.*state_dict=whole"):
            run.model.save_pretrained(f"{root}/{rank}")
    if rank == 0:
        run.model.save_pretrained(
            f"{root}/whole", state_dict=dict(want)
        )  # it empties the one it gets
        assert_same(pretrained(f"{root}/whole"), want)
    train(run, 2, 3)


def pretrained(path):
    return transformers.LlamaForCausalLM.from_pretrained(path).state_dict()


def shard_layers(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
