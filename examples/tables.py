"""Lays out the dictionary of `dmuon.report` as tables that people read, whatever it holds."""


def as_tables(report: dict) -> str:
    """Plain facts come first, nested names joined by dots; a list of records is a table below."""
    facts: list[list[str]] = []
    tables: list[tuple[str, list[dict]]] = []
    _sort_out("", report, facts, tables)
    parts = [_columns(facts)]
    for name, records in tables:
        keys = list(dict.fromkeys(key for record in records for key in record))
        body = [[_text(key, record.get(key, "")) for key in keys] for record in records]
        parts.append(f"  {name}\n{_columns([keys, *body], indent=4)}")
    return "\n\n".join(parts)


def _sort_out(name: str, value, facts: list, tables: list) -> None:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        tables.append((name, value))
    elif isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        tables.append((name, [{"name": key, **inner} for key, inner in value.items()]))
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            _sort_out(f"{name}.{key}" if name else str(key), inner, facts, tables)
    else:
        facts.append([name, _text(name, value)])


def _text(name: str, value) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_text(name, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if "bytes" in name:
        return f"{value / 2**20:,.2f} MiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _columns(rows: list[list[str]], indent: int = 2) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(" " * indent + line.rstrip() for line in lines)
