"""``python -m dmuon doctor``: what is installed, what will run, whether two processes train as one."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from dmuon import _C
from dmuon.newton_schulz import NewtonSchulz
from dmuon.pictures import table

# Package -> the versions that were tried.
TRIED = {
    "deepspeed": ("0.19.8",),
    "transformers": ("5.24",),
    "accelerate": ("1.15",),
    "torchtitan": ("0.3",),
}
_SELF_TEST = """
import os, sys, torch, torch.distributed as dist
import dmuon
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
start = [p.detach().clone() for p in model.parameters()]
mesh = init_device_mesh("cpu", (2,))
dmuon.dedicate_params_ddp(model, mesh, lambda name, p: p.ndim == 2)
dmuon.replicate(model, mesh)
optimizer = dmuon.Muon(model, lr=0.02)
model(torch.ones(4, 8) * (dist.get_rank() + 1)).square().mean().backward()
optimizer.step()
dmuon.wait_all_replicate_broadcasts(model)
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
moved = (flat - torch.cat([p.flatten() for p in start])).abs().max().item()
both = [torch.empty_like(flat) for _ in range(2)]
dist.all_gather(both, flat)
assert torch.equal(both[0], both[1]), "the two processes hold other weights"
assert moved > 0, "nothing was trained"
dist.destroy_process_group()
"""


def run(as_json: bool = False) -> int:
    """Prints what it finds; 0 where nothing is wrong."""
    found = findings()
    problem = self_test()
    found["self-test"] = problem or "two processes train as one"
    advice = _advice(found, problem)
    if as_json:
        print(json.dumps({"findings": found, "advice": advice}))
    else:
        print(table(list(found.items())))
        print("\n".join(f"- {line}" for line in advice) or "Nothing to do.")
    return 1 if problem else 0


def findings() -> dict[str, str]:
    """Name -> what there is."""
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {
        "dmuon": version("dmuon"),
        "python": sys.version.split()[0],
        "torch": f"{torch.__version__} (the binary was built for {_C.compiled_torch_version()})",
        "backends": ", ".join(backends) or "none",
        "accelerators": f"{devices} CUDA devices" if devices else "none: CPU",
        "cores": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        "Newton-Schulz": _C.newton_schulz_kernel(1, 1024, 4096, NewtonSchulz().options(5)),
    }
    return found | {name: _version(name) for name in TRIED}


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed (not needed)"
    try:
        found = version(package)
    except PackageNotFoundError:
        return "installed, of no known version"
    tried = any(found.startswith(t) for t in TRIED[package])
    return found if tried else f"{found} (tried: {', '.join(TRIED[package])})"


def self_test() -> str:
    """What went wrong in a step of two processes; empty where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "self_test.py")
        script.write_text(_SELF_TEST)
        store = f"file://{folder}/store"
        processes = [_start(script, store, rank) for rank in (0, 1)]
        outputs = [_end(process) for process in processes]
    return next((_problem(code, text) for code, text in outputs if code), "")


def _problem(code: int, text: str) -> str:
    """The error, or how a process ended that wrote none."""
    return (text.strip().splitlines() or [f"a process ended with exit code {code}"])[-1]


def _start(script: Path, store: str, rank: int) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), store, str(rank)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen) -> tuple[int, str]:
    try:
        _, text = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        return 1, "no answer within two minutes"
    return process.returncode, text


def _advice(found: dict[str, str], problem: str) -> list[str]:
    advice = [
        f"{name} {found[name]}: dmuon was not tried with it; it may work."
        for name in TRIED
        if "tried:" in found[name]
    ]
    if problem:
        advice.append(
            "Two processes could not train together. Where the error names an address, set GLOO_SOCKET_IFNAME to "
            "an interface that both reach, for instance lo."
        )
    return advice
