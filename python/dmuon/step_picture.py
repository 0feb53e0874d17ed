"""The last step as a picture: a row of time for the training thread and for what goes on beside it, and what each
phase took."""

from collections.abc import Iterable, Mapping

from dmuon import _C
from dmuon.pictures import duration, new_figure
from dmuon.report_table import BESIDE, headline, step_rows, words

# Of Okabe and Ito: told apart by colour-blind readers. Work is cool, waiting warm.
_COLORS = {
    "other": "#d0d0d0",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "reduce_issue": "#7f7f7f",
    "checks": "#a6a6a6",
    "newton_schulz": "#009e73",
    "adamw": "#66cdaa",
    "forward_fetch": "#e69f00",
    "backward_fetch": "#e69f00",
    "reduce_wait": "#d55e00",
    "tp_exchange": "#000000",
    "agreement": "#cc79a7",
    "publish": "#882255",
}
_HIDDEN, _EXPOSED = "#9ecae1", "#d55e00"
_LEAST = 0.0005  # of the step: narrower spans are drawn this wide

Times = list[tuple[float, float]]  # begin, end


def step_picture(report: Mapping):
    """Raises ImportError where there is no matplotlib."""
    step = report["last_step"]
    phases = step_rows(step)
    beside = [what for what in BESIDE if step["beside"][what]["seconds"] > 0]
    tall = 0.4 * (len(beside) + 1) + 0.75, 0.22 * len(phases) + 0.55
    figure = new_figure("plot", (10, sum(tall) + 0.5))
    figure.suptitle(
        f"rank {report['rank']}, step {report['steps']}: {headline(report)}", fontsize=11
    )
    above, below = figure.subplots(2, 1, height_ratios=tall)
    scale, unit = (1e3, "ms") if step["seconds"] < 1 else (1.0, "s")
    _timeline(above, report.timeline, beside, scale)
    above.set_xlim(0, step["seconds"] * scale)
    above.set_xlabel(f"{unit} since the end of the step before")
    _bars(below, phases, step["seconds"], scale)
    below.set_xlabel(f"{unit}; hatched: waits for other ranks")
    return figure


def _timeline(axes, timeline, beside: list[str], scale: float) -> None:
    phases = _spans(timeline, False)
    least = _LEAST * max((end for times in phases.values() for _, end in times), default=0)
    for name, times in phases.items():
        _row(axes, 0, times, scale, least, facecolor=_COLORS[name], hatch=_hatch(name))
    waiting = sorted(t for n, times in phases.items() if n in _C.WAITING_PHASES for t in times)
    lanes = _spans(timeline, True)
    for i, what in enumerate(beside, 1):
        times = lanes.get(what, [])
        _row(axes, i, times, scale, least, facecolor=_HIDDEN)
        _row(axes, i, overlap(times, waiting), scale, least, facecolor=_EXPOSED, hatch="////")
    axes.set_yticks(range(len(beside) + 1), ["training thread", *(BESIDE[what] for what in beside)])
    axes.set_ylim(len(beside) + 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    _plain(axes)
    if beside:
        _legend(axes)


def _spans(timeline, beside: bool) -> dict[str, Times]:
    found: dict[str, Times] = {}
    for is_beside, what, begin, end in timeline:
        if is_beside == beside:
            found.setdefault(what, []).append((begin, end))
    return found


def _row(axes, y: int, times: Iterable, scale: float, least: float, **look) -> None:
    bars = [(begin * scale, max(end - begin, least) * scale) for begin, end in times]
    axes.broken_barh(bars, (y - 0.36, 0.72), edgecolor="white", linewidth=0, **look)


def overlap(a: Times, b: Times) -> Times:
    """What lies in both; each is sorted and without overlaps of its own."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _bars(axes, phases, total: float, scale: float) -> None:
    for y, (name, seconds, _) in enumerate(phases):
        axes.barh(
            y,
            seconds * scale,
            height=0.72,
            color=_COLORS[name],
            hatch=_hatch(name),
            edgecolor="white",
            linewidth=0,
        )
        axes.text(
            seconds * scale,
            y,
            f" {duration(seconds)}, {seconds / total:.0%}",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(phases)), [words(name) for name, _, _ in phases])
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    _plain(axes)


def _hatch(name: str) -> str | None:
    return "////" if name in _C.WAITING_PHASES else None


def _plain(axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes) -> None:
    from matplotlib.patches import Patch

    axes.legend(
        handles=[
            Patch(facecolor=_HIDDEN, label="hidden: the training thread works"),
            Patch(
                facecolor=_EXPOSED,
                hatch="////",
                edgecolor="white",
                label="exposed: it waits for other ranks",
            ),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        fontsize=8.5,
        borderpad=0,
    )
