"""What torchtitan asks of torch where there is no GPU. Imported before it; with a GPU this does nothing."""

import os
import types

import torch

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    os.environ.setdefault(
        "TORCHDYNAMO_DISABLE", "1"
    )  # what it compiles by itself takes minutes here
    torch._utils._get_available_device_type = lambda: "cpu"
    whole = types.SimpleNamespace(total_memory=1, name="cpu")
    for name, value in {
        "get_device_name": "cpu",
        "get_device_properties": whole,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "current_device": 0,
    }.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)
