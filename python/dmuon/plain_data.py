"""JSON that gives back what was saved: tuples, dictionaries whose keys are no strings, as some schedulers have
them, and tensors, as states of random number generators are."""

import base64
import json

import torch

_DICT, _TUPLE, _TENSOR = "<dict>", "<tuple>", "<tensor>"
MOST_BYTES = 4 << 20  # of tensors in one text, which is read whole, and base64 adds a third


def dumps(value) -> str:
    """Tensors as copies, bit for bit.

    Raises:
        TypeError: naming the type that it does not take.
        ValueError: it holds more than ``MOST_BYTES`` of tensors, or holds itself.
    """
    sizes: list[int] = []
    try:
        text = json.dumps(_encoded(value, sizes))
    except RecursionError as error:
        raise ValueError("it holds itself, or is nested too deep") from error
    if sum(sizes) > MOST_BYTES:
        raise ValueError(
            f"it has {sum(sizes) / 2**20:.1f} MiB of tensors, and {MOST_BYTES >> 20} are the most. Register "
            "large ones as buffers of the model, or save them in a file of their own"
        )
    return text


def loads(text: str):
    """Tensors on the CPU. Raises ValueError or TypeError where ``dumps`` has not made it."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value, sizes: list[int]):
    if isinstance(value, torch.Tensor):
        sizes.append(value.numel() * value.dtype.itemsize)
        return _text_of(value) if sum(sizes) <= MOST_BYTES else None
    if isinstance(value, dict):
        marks = {_DICT, _TUPLE, _TENSOR}
        if all(isinstance(key, str) for key in value) and not marks & set(value):
            return {key: _encoded(v, sizes) for key, v in value.items()}
        return {_DICT: [[_encoded(key, sizes), _encoded(v, sizes)] for key, v in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(v, sizes) for v in value]}
    return [_encoded(v, sizes) for v in value] if isinstance(value, list) else value


def _text_of(tensor: torch.Tensor) -> dict:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(
            f"{type(tensor).__name__} of {tensor.layout} on {tensor.device} is no plain tensor; give what lies "
            "on this rank, dense"
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {_TENSOR: [dtype, list(tensor.shape), base64.b64encode(content).decode()]}


def _decoded(value: dict):
    if value.keys() == {_DICT}:
        return dict(value[_DICT])
    if value.keys() == {_TENSOR}:
        return _tensor(*value[_TENSOR])
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    known = getattr(torch, dtype, None)
    content = bytearray(base64.b64decode(text, validate=True))
    if not isinstance(known, torch.dtype):
        raise ValueError(f"a tensor has the dtype {dtype!r}, which torch has not")
    bytes_ = torch.empty(0, dtype=torch.uint8)
    if content:
        bytes_ = torch.frombuffer(content, dtype=torch.uint8)
    try:
        return bytes_.view(known).reshape(shape)
    except RuntimeError as error:
        raise ValueError(f"a tensor's bytes are not {shape} of {dtype}") from error
