"""``Report``: what ``dmuon.report`` gives, to read, to print and to look at."""

import html
import json
from os import PathLike

from dmuon import report_table as rows
from dmuon.step_picture import step_picture


class Report(dict):
    """A dictionary of plain data that prints as a table, in a terminal and in a notebook.

    ``timeline``: the spans of the last step, ``(beside, what, begin, end)``, seconds since it began. ``beside``:
    False for the phases of the training thread, which fill the step; True for what goes on beside it. The first
    4096 of a step are kept.
    """

    def __init__(self, facts: dict, timeline=()):
        super().__init__(facts)
        self.timeline = tuple(timeline)

    def __str__(self) -> str:
        return rows.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [
            _table(rows.summary(self)),
            f"<p>last step: {html.escape(rows.headline(self))}</p>",
        ]
        if self["last_step"] is not None:
            parts += [_phases(self["last_step"]), _table(rows.beside_rows(self["last_step"]))]
        head, *lines = rows.parameter_rows(self["parameters"])
        return "\n".join([*parts, _table(lines, head)])

    def to_json(self, indent: int | None = None) -> str:
        """Without ``timeline``; ``json.dumps`` of the report gives the same."""
        return json.dumps(self, indent=indent)

    def plot(self, path: str | PathLike | None = None):
        """A picture of the last step: what the training thread was in, what went on beside it, and what each
        phase took.

        Args:
            path: where to save it, as ``.png``, ``.svg`` or ``.pdf``; None: nowhere.

        Returns:
            The ``matplotlib.figure.Figure``. A notebook shows it.

        Raises:
            ImportError: there is no matplotlib.
            ValueError: no step has been taken.
        """
        if self["last_step"] is None:
            raise ValueError("there is nothing to plot: no step has been taken. Call step() first.")
        figure = step_picture(self)
        if path is not None:
            figure.savefig(path)
        return figure


def _table(lines, head=()) -> str:
    def row(cells, tag):
        inner = "".join(
            f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in cells
        )
        return f"<tr>{inner}</tr>"

    body = [row(head, "th")] if head else []
    return "\n".join(["<table>", *body, *(row(line, "td") for line in lines), "</table>"])


def _phases(step) -> str:
    lines = []
    for name, seconds, waits in rows.step_rows(step):
        share = seconds / step["seconds"]
        color = "#d55e00" if waits else "#0072b2"
        bar = f'<div style="background:{color};height:0.8em;width:{20 * share:.2f}em"></div>'
        cells = (rows.words(name), rows.duration(seconds), f"{share:.0%}")
        inner = "".join(f'<td style="text-align:left">{cell}</td>' for cell in (*cells, bar))
        lines.append(f"<tr>{inner}</tr>")
    return "\n".join(["<table>", *lines, "</table>"])
