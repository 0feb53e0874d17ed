"""Newton-Schulz for other devices than the CPU, where this dmuon was built with it."""

import warnings
from pathlib import Path

from dmuon import _C


def load_device_kernels(folder: Path | None = None) -> None:
    """Register the device libraries in ``folder``, by default those beside the extension.

    One that is there and does not load is a RuntimeWarning: torch's own products serve its tensors.
    """
    library = (folder or Path(_C.__file__).parent) / "libdmuon_cuda.so"
    if not library.exists():
        return
    try:
        _C.load_device_newton_schulz(str(library))
    except RuntimeError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
