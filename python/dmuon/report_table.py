"""The dictionary of ``dmuon.report`` as rows, and the rows as text of at most 100 columns."""

import re
import textwrap
from collections.abc import Iterable, Mapping

from dmuon import _C
from dmuon.pictures import amount, bars, duration, table

WIDTH = 100
_EACH = 16  # so many parameters have a line each; of more, those alike share one
_LINES = 24
_BAR = 40
_SHOWN = 5e-7  # seconds: less is written 0 us
BESIDE = {
    "fetch": "fetches ahead",
    "reduce": "reductions",
    "tp": "tensor parallelism",
    "publish": "publishes",
}


def text(report: Mapping) -> str:
    parts = [
        table(_wrapped(summary(report))),
        _step_text(report),
        "\n".join(columns(parameter_rows(report["parameters"]))),
    ]
    return "\n\n".join(parts)


def _wrapped(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    room = WIDTH - 2 - max(len(name) for name, _ in rows)
    return [
        ("" if i else name, part)
        for name, value in rows
        for i, part in enumerate(textwrap.wrap(value, room))
    ]


def summary(report: Mapping) -> list[tuple[str, str]]:
    """Names and values: what this rank does and holds, and its share of the job."""
    mine = next(r for r in report["ranks_planned"] if r["rank"] == report["rank"])
    every = report["ranks_planned"]
    return [
        ("rank", f"{report['rank']} of {report['ranks']}, {_topology(report)}"),
        (
            "matrices",
            f"{report['matrices']} in {report['units']} units, {mine['matrices']} of them on this rank; "
            f"{_counted(report['routes'])}",
        ),
        (
            "balance",
            f"busiest rank {report['load_max_over_mean']:.3f} of the mean; W* {report['w_star']:.1f}: more ranks "
            "than this do not help",
        ),
        ("load by rank", bars([r["flops"] for r in every])),
        (
            "owner memory",
            f"{amount(mine['state_bytes'], 'B')} on this rank, {amount(report['max_state_bytes'], 'B')} at most; "
            f"Newton-Schulz keeps {amount(report['ns_workspace_bytes'], 'B')}",
        ),
        (
            "Newton-Schulz",
            f"{report['ns_calls_last_step']} matrices in the last step, {report['ns_calls']} since setup",
        ),
        *(
            ("" if i else "kernels", f"{kernel}: {shapes}")
            for i, (kernel, shapes) in enumerate(kernels(report["parameters"]).items())
        ),
        (
            "bytes sent",
            f"{amount(report['sent_bytes_last_step'], 'B')} in the last step, "
            f"{amount(report['sent_bytes_total'], 'B')} since setup: {_channels(report)}",
        ),
        *_tensor_parallel(report["tensor_parallel"]),
        ("steps", _steps(report)),
    ]


def _topology(report: Mapping) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in report["topology"].items() if size > 1)
    return f"{report['runtime']}, {axes or 'no axis of several ranks'}, on {report['device']}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def kernels(parameters: Iterable[Mapping]) -> dict[str, str]:
    """Kernel -> how many matrices of which shapes it takes."""
    found: dict[str, dict[str, int]] = {}
    for p in parameters:
        if p["kernel"]:
            shapes = found.setdefault(p["kernel"], {})
            shapes[_shape(p)] = shapes.get(_shape(p), 0) + 1
    return {
        kernel: _few(f"{count} of {shape}" for shape, count in shapes.items())
        for kernel, shapes in found.items()
    }


def _few(items: Iterable[str], most: int = 3) -> str:
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _channels(report: Mapping) -> str:
    sent = {c: n for c, n in report["sent_bytes_by_channel"].items() if n}
    largest = sorted(sent.items(), key=lambda item: -item[1])
    return _few((f"{channel} {amount(count, 'B')}" for channel, count in largest), 4) or "nothing"


def _tensor_parallel(tp: Mapping | None) -> list[tuple[str, str]]:
    if tp is None:
        return []
    saved = amount(tp["distributed_gram_saved_bytes"], "B")
    gram = f"; {len(tp['distributed_gram'])} in shards save {saved} a step"
    staging = sum(use["bytes"] for use in tp["staging"].values())
    return [
        (
            "tensor parallel",
            f"{tp['size']} ranks{gram if tp['distributed_gram'] else ''}; messages take "
            f"{amount(staging, 'B')}",
        )
    ]


def _steps(report: Mapping) -> str:
    parts = [f"{report['steps']}"]
    if report["steps_without_gradient"]:
        parts.append(f"{report['steps_without_gradient']} of them updated nothing")
    if report["aborted_passes"]:
        parts.append(f"{report['aborted_passes']} backward passes ended with an exception")
    return ", ".join(parts)


# The last step ------------------------------------------------------------------------------------


def step_rows(step: Mapping) -> list[tuple[str, float, bool]]:
    """Phase, seconds, whether it waits for other ranks; in the order of a step, without those of no time to speak of."""
    return [
        (name, seconds, name in _C.WAITING_PHASES)
        for name, seconds in step["phases"].items()
        if seconds >= _SHOWN
    ]


def headline(report: Mapping) -> str:
    step = report["last_step"]
    if step is None:
        return "no step has been taken"
    waits, whole = step["waiting_seconds"], step["seconds"]
    host = "" if report["device"] == "cpu" else "; the host's times, not the device's"
    return (
        f"{duration(whole)} on this rank, {duration(waits)} ({waits / whole:.0%}) of it waiting for other "
        f"ranks{host}"
    )


def beside_rows(step: Mapping) -> list[tuple[str, str]]:
    return [
        (
            BESIDE[what],
            f"{duration(times['seconds'])} under way, {duration(times['hidden_seconds'])} of it hidden",
        )
        for what, times in step["beside"].items()
        if times["seconds"] > 0
    ]


def _step_text(report: Mapping) -> str:
    title = f"last step: {headline(report)}"
    step = report["last_step"]
    if step is None:
        return title
    lines = []
    for name, seconds, waits in step_rows(step):
        share = seconds / step["seconds"]
        bar = ("░" if waits else "█") * round(share * _BAR)
        lines.append(f"  {words(name):<15}{duration(seconds):>9}  {share:>4.0%}  {bar}".rstrip())
    lines += [f"  {what}: {times}" for what, times in beside_rows(step)]
    return "\n".join([title, *lines])


def words(name: str) -> str:
    return (
        name.replace("_", " ").replace("newton schulz", "Newton-Schulz").replace("adamw", "AdamW")
    )


# Parameters ---------------------------------------------------------------------------------------


def parameter_rows(parameters: list[Mapping]) -> list[tuple[str, ...]]:
    """Header and lines: name, how many, shape, owners, kernel. Of many parameters those alike share a line, and
    their numbers are written ``*``."""
    each = len(parameters) <= _EACH
    groups: dict[tuple, list[Mapping]] = {}
    for p in parameters:
        name = p["name"] if each else re.sub(r"\d+", "*", p["name"])
        groups.setdefault((name, _shape(p), _method(p)), []).append(p)
    lines = [
        (name, str(len(members)), shape, ranges({m["owner"] for m in members}), method)
        for (name, shape, method), members in groups.items()
    ]
    rest = len(lines) - _LINES
    if rest > 0:
        left = sum(int(line[1]) for line in lines[_LINES:])
        lines = [*lines[:_LINES], (f"and {rest} lines more", str(left), "", "", "")]
    return [("parameter", "count", "shape", "owners", "method"), *lines]


def _shape(p: Mapping) -> str:
    return " x ".join(map(str, p["shape"]))


def _method(p: Mapping) -> str:
    return p["kernel"] or p["route"]


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return _few((str(a) if a == b else f"{a}-{b}" for a, b in runs), 4)


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned; the first column gives way where a line would be wider than WIDTH."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(12, min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)))
    return [
        "  ".join(
            f"{_shortened(cell, width):<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()[:WIDTH]
        for row in rows
    ]


def _shortened(name: str, width: int) -> str:
    """Its end says more than its middle."""
    if len(name) <= width:
        return name
    head = (width - 1) // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
