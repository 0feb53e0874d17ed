"""Real text that every machine with Python has: the sources of its standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4_000_000
LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),  # tables of numbers, and one long string
    *("site-packages", "dist-packages"),  # not the library
}


@dataclass(frozen=True)
class Corpus:
    """Bytes as ``uint8`` tensors; no file has bytes in both."""

    train: Tensor
    validation: Tensor

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step: the same on every rank of every world, and in one process.

        Returns tokens and targets, both ``[size, context]``; a rank trains on its slice of rows.
        """
        generator = torch.Generator().manual_seed((seed << 32) + step)
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        return _windows(self.train, starts, context)

    def validation_batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """``size`` windows spread evenly over the validation files; always the same ones."""
        starts = torch.linspace(0, len(self.validation) - context - 1, size).long()
        return _windows(self.validation, starts, context)


def load_corpus() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {True: bytearray(), False: bytearray()}
    for path in _sources(root):
        texts[_is_validation(path.relative_to(root))] += path.read_bytes()
        if len(texts[True]) + len(texts[False]) > MAX_BYTES:
            break
    train, validation = (torch.frombuffer(texts[key], dtype=torch.uint8) for key in (False, True))
    return Corpus(train, validation)


def _sources(root: Path) -> list[Path]:
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in paths if not LEFT_OUT.intersection(path.parts)]


def _is_validation(path: Path) -> bool:
    """One file in ten, chosen by its name alone: adding a file moves no other."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] < 26


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]
