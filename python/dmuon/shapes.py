"""Shapes of models that nobody has allocated, from a file or a function."""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmuon.errors import listed

_NUMBERED = re.compile(r"^(.*?\.\d+)\.")
_KINDS = (
    "a Hugging Face config.json, a .safetensors file, its .safetensors.index.json, a directory that holds one of "
    "them, or module:function"
)


@dataclass(frozen=True)
class Shape:
    """A parameter that nobody has allocated."""

    name: str
    size: tuple[int, ...]

    @property
    def layer(self) -> str:
        """Its repeated block: the path up to the first number. Empty where it has none."""
        found = _NUMBERED.match(self.name)
        return found[1] if found else ""


def read_shapes(source: str) -> list[Shape]:
    """Parameters of a Hugging Face ``config.json``, of ``.safetensors`` files or their index, of a directory that holds
    them, or of the model that ``module:function`` makes, on the meta device.

    Raises:
        ValueError: none of these; it cannot be read; the function raises; a package that is needed is missing.
    """
    path = Path(source)
    if source and path.is_dir():
        return _of_directory(path)
    if ":" in source and not path.exists():
        return _of_function(source)
    if not source or not path.exists():
        there = "is not there" if path.suffix in (".json", ".safetensors") else "is no model"
        raise ValueError(f"{source!r} {there}. Give {_KINDS}.")
    if path.suffix == ".safetensors":
        return _of_safetensors([path])
    if path.suffix == ".json":
        return _of_index(path) if path.name.endswith(".index.json") else _of_config(path)
    raise ValueError(f"{source!r} is no model that dmuon can read. Give {_KINDS}.")


def _of_directory(path: Path) -> list[Shape]:
    if (path / "config.json").exists():
        return _of_config(path / "config.json")
    if indices := sorted(path.glob("*.safetensors.index.json")):
        return _of_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither a config.json nor .safetensors files.")
    return _of_safetensors(files)


def _of_index(path: Path) -> list[Shape]:
    files = _json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} has no 'weight_map'; it is no index of .safetensors files.")
    shards = [path.parent / name for name in sorted(set(files.values()))]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise ValueError(
            f"{path} names {listed(missing)}, not there: the shapes are in these files."
        )
    return _of_safetensors(shards)


def _of_safetensors(files: Iterable[Path]) -> list[Shape]:
    shapes: dict[str, Shape] = {}
    for path in files:
        for name, size in _header(path).items():
            if name in shapes:
                raise ValueError(f"{path} holds {name!r}, which another file holds too.")
            shapes[name] = Shape(name, size)
    return list(shapes.values())


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Eight bytes of length, then JSON. Integers are no parameters."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"its header would have {length} bytes")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return {
            name: tuple(int(size) for size in entry["shape"])
            for name, entry in entries.items()
            if "F" in entry["dtype"]
        }
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no .safetensors file, or is damaged: {error}.") from error


def _of_config(path: Path) -> list[Shape]:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package transformers: pip install transformers."
        ) from error
    _json(path)
    make = _answer(path, lambda: _model_class(AutoConfig.from_pretrained(path)))
    return _on_meta(path, make)


def _model_class(config) -> Callable:
    """The one that the config names, with whatever lies beside a language model."""
    import transformers

    for name in config.architectures or ():
        if made := getattr(transformers, name, None):
            return lambda: made(config)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


def _json(path: Path) -> Mapping:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds a {type(read).__name__}; it must be an object.")
    return read


def _of_function(source: str) -> list[Shape]:
    module, _, name = source.partition(":")
    if not module or not name:
        raise ValueError(f"{source!r}: write module:function.")
    imported = _answer(source, lambda: importlib.import_module(module), "cannot be imported:")
    function = getattr(imported, name, None)
    if not callable(function):
        raise ValueError(f"{source!r} cannot be imported: {module} has no function {name!r}.")
    return _on_meta(source, function)


def _answer(source, ask: Callable, failed: str = "failed with"):
    """Raises ValueError naming the source, whatever `ask` raises: it runs code that is not ours."""
    try:
        return ask()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise ValueError(f"{str(source)!r} {failed} {type(error).__name__}: {first}") from error


def _on_meta(source, make: Callable) -> list[Shape]:
    import torch

    with torch.device("meta"):
        model = _answer(source, make)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"{str(source)!r} made a {type(model).__name__}; it must return a torch.nn.Module."
        )
    return [Shape(name, tuple(p.shape)) for name, p in model.named_parameters()]
