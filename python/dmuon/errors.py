"""How an error says what was given, what was wanted and what to do."""

import difflib
from collections.abc import Sequence


def nearest(given: str, known: Sequence[str]) -> str:
    """``which is not a key; ...`` with the nearest known one."""
    close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"which is unknown; {hint}known: {', '.join(known)}."


def choice(name: str, value, options: Sequence) -> None:
    if value not in options:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, options))}.")


def listed(names: Sequence[str], most: int = 10) -> str:
    """At most ``most`` names, then how many more."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
