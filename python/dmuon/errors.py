"""How an error says what was given, what was wanted and what to do."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence


def nearest(given: str, known: Sequence[str]) -> str:
    """``which is not a key; ...`` with the nearest known one."""
    close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"which is unknown; {hint}known: {', '.join(known)}."


def check_keys(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises ValueError where a key of ``given`` is unknown."""
    for key in given:
        if key not in known:
            raise ValueError(f"{where} has {key!r}, {nearest(key, known)}")


def choice(name: str, value, options: Sequence) -> None:
    if value not in options:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, options))}.")


def listed(names: Sequence[str], most: int = 10) -> str:
    """At most ``most`` names, then how many more."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def summarised(names: Sequence[str], most: int = 10) -> str:
    """All of them, or where they are many one line for those that differ in numbers alone: ``'layers.*.up.weight' (24)``."""
    if len(names) <= most:
        return listed(names, most)
    kinds = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    shown = [f"{kind!r} ({n})" if n > 1 else repr(kind) for kind, n in kinds.most_common(most)]
    left = len(kinds) - len(shown)
    return ", ".join(shown) + (f" and {left} more kinds" if left > 0 else "")
