"""DeepSpeed, also where there is no GPU: there it would compile C++ for minutes before it trains."""

import logging
import os

import torch


def import_deepspeed():
    """Call it before anything imports DeepSpeed, and ``deepspeed.init_distributed`` after it."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it warns that it finds no other
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its Muon is compiled, for each shape
    import deepspeed
    import deepspeed.ops

    if on_cpu:  # built as soon as ranks meet; only inference uses it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(
        logging.ERROR
    )  # it logs its whole config, on every rank
    return deepspeed


def torch_adamw() -> dict:
    """For ``optimizer.params`` of type AdamW: DeepSpeed's own kernel is compiled, torch's is there."""
    return {} if torch.cuda.is_available() else {"torch_adam": True}
