"""JSON that gives back what was saved: tuples, and dictionaries whose keys are no strings, as some schedulers
have them."""

import json

_DICT, _TUPLE = "<dict>", "<tuple>"


def dumps(value) -> str:
    """Raises TypeError naming the type that JSON does not know."""
    return json.dumps(_encoded(value))


def loads(text: str):
    return json.loads(text, object_hook=_decoded)


def _encoded(value):
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {_DICT, _TUPLE} & set(value):
            return {key: _encoded(v) for key, v in value.items()}
        return {_DICT: [[_encoded(key), _encoded(v)] for key, v in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(v) for v in value]}
    return [_encoded(v) for v in value] if isinstance(value, list) else value


def _decoded(value: dict):
    if value.keys() == {_DICT}:
        return dict(value[_DICT])
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value
