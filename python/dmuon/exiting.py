"""The end of a process whose process groups still have threads."""

import contextlib
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")  # Linux; elsewhere there is none to look at
_RUN_LOOP = "pt_gloo_runloop"  # as torch names the threads of a gloo group


def let_threads_rest(least_s: float = 0.05, most_s: float = 2.0) -> None:
    """A run-loop thread drops the tensors of an operation a moment after that has ended. If the interpreter is gone by
    then the process aborts ("terminate called without an active exception"), as torch alone does after
    ``DTensor.full_tensor``: a DeviceMesh and FSDP2's modules keep the group, and its threads, past
    ``destroy_process_group``. So those that still run get their moment, on a busy machine a longer one. Local."""
    end = time.monotonic() + most_s
    time.sleep(least_s)
    while _any_runs() and time.monotonic() < end:
        time.sleep(0.01)


def _any_runs() -> bool:
    return any(_runs(task) for task in _TASKS.glob("*"))


def _runs(task: Path) -> bool:
    """Whether it is a run-loop thread on a processor, or waiting for one."""
    with contextlib.suppress(OSError):  # it has ended
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        return name == _RUN_LOOP and rest.split()[0] == "R"
    return False
