"""What plans and reports look like: amounts, tables, bars; and plans as tables and pictures."""

import statistics

_UNITS = ("", "K", "M", "G", "T", "P", "E")
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 64


def amount(value: float, unit: str, base: int = 1000) -> str:
    """``1.25 GB``."""
    step = 0
    while abs(value) >= base and step < len(_UNITS) - 1:
        value, step = value / base, step + 1
    digits = 0 if step == 0 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {_UNITS[step]}{unit}"


def duration(seconds: float) -> str:
    """``35.2 ms``."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("us", 1e-6))
    value = seconds / size
    return f"{value:.{0 if unit == 'us' else 2 if value < 10 else 1}f} {unit}"


def table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def new_figure(what: str, size: tuple[float, float]):
    """Raises ImportError where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{what} needs the package matplotlib: pip install matplotlib."
        ) from error
    return Figure(figsize=size, layout="constrained")


def plan_table(planned) -> str:
    """What a plan comes to, and the load of every rank as one line of bars."""
    facts = planned.as_dict()
    topology = " x ".join(f"{axis} {size}" for axis, size in planned.topology.items() if size > 1)
    moved = facts["bytes_per_step"]
    state = facts["state_bytes"]
    rows = [
        ("topology", f"{topology or 'one rank'}: {facts['ranks']} ranks"),
        (
            "parameters",
            f"{amount(facts['parameters'], '')}, {amount(facts['dedicated'], '')} of them in {facts['matrices']} matrices with an owner",
        ),
        ("units", f"{facts['units']}, each moves at once"),
        (
            "Newton-Schulz",
            f"{amount(facts['max_load_flops'], 'FLOP')} on the busiest rank, {facts['load_max_over_mean']:.3f} of the mean",
        ),
        (
            "balance",
            f"{facts['load_max_over_bound']:.4f} of what no assignment can beat; W* {facts['w_star']:.1f}: more ranks than this do not help",
        ),
        (
            "owner memory",
            f"{amount(max(state), 'B')} at most, {amount(statistics.fmean(state), 'B')} on average (weight, master, momentum)",
        ),
        (
            "bytes per step",
            f"{amount(sum(moved.values()), 'B')} in the job" if moved else "none: one rank",
        ),
        *((f"  {channel}", amount(count, "B")) for channel, count in moved.items()),
        ("load by rank", bars(facts["loads"])),
    ]
    return table(rows)


def bars(loads: list[float]) -> str:
    """One character for each rank, or for the busiest of several."""
    group = -(-len(loads) // _WIDTH)
    tops = [max(loads[i : i + group]) for i in range(0, len(loads), group)]
    top = max(tops) or 1
    line = "".join(_BARS[round(load / top * (len(_BARS) - 1))] for load in tops)
    return line + (f"  ({group} ranks each)" if group > 1 else "")


def plan_picture(planned, path: str) -> None:
    """Ranks x load, and what each owner holds. Needs matplotlib."""
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--picture is {path!r}; it must end in .png, .svg or .pdf.")
    try:
        figure = new_figure("--picture", (9, 5))
    except ImportError as error:
        raise ValueError(str(error)) from error
    loads, state = sorted(planned.plan.loads(), reverse=True), planned.plan.state_bytes()
    above, below = figure.subplots(2, 1, sharex=True)
    above.bar(range(len(loads)), [load / 1e12 for load in loads], width=1.0)
    above.axhline(
        planned.plan.report.mean_load / 1e12, color="black", linewidth=0.8, linestyle="--"
    )
    above.set_ylabel("TFLOP per step")
    above.set_title(
        f"{len(planned.plan.matrices)} matrices on {len(loads)} ranks; dashed: the mean"
    )
    below.bar(
        range(len(state)),
        [held / 1e9 for held in sorted(state, reverse=True)],
        width=1.0,
        color="tab:orange",
    )
    below.set_ylabel("GB of an owner")
    below.set_xlabel("ranks, in each picture the largest first")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"--picture {path} cannot be written: {error.strerror}.") from error
