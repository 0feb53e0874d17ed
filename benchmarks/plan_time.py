"""Planning 100,000 matrices on 10,000 ranks, beside a heap-based LPT in Python, in CPU time; and the
balance of plans of known models, the worst of all of them."""

import os
from pathlib import Path

from plan import balance, bench_plan
from support import Figure

PROGRAMS = Path(__file__).parents[1] / "build" / "benchmarks"


def measure() -> list[Figure]:
    return _times() + _balance()


def _times() -> list[Figure]:
    program = os.environ.get("DMUON_PLAN_BENCH", PROGRAMS / "dmuon_plan_bench")
    baseline_ms, rows = bench_plan.measure(program)
    largest = rows[0]["cpu_ms"]
    with_tp = next(row for row in rows if row["list"] == rows[0]["list"] and row["tp"] == 8)
    return [
        Figure("plan: 100,000 matrices on 10,000 ranks, ms of CPU", largest, 50),
        Figure("plan: the same with tp = 8, ms of CPU", with_tp["cpu_ms"], 50),
        Figure("plan: its time / a heap-based LPT in Python", largest / baseline_ms, 1 / 8),
        Figure("  the LPT in Python, ms of CPU", baseline_ms),
        Figure("plan: makespan / plain LPT's, worst of the long lists", _over_lpt(rows), 1),
    ]


def _over_lpt(rows: list[dict]) -> float:
    return max(row["makespan_over_bound"] / row["lpt_over_bound"] for row in rows)


def _balance() -> list[Figure]:
    rows = balance.measure(os.environ.get("DMUON_PLAN_BALANCE", PROGRAMS / "dmuon_plan_balance"))
    small = [row for row in rows if row["matrices"] <= 64]
    few = [row for row in rows if row["costs"] <= 5]
    return [
        Figure(
            "balance: makespan / plain LPT's, worst of all models",
            max(row["over_bound"] / row["lpt_over_bound"] for row in rows),
            1,
        ),
        Figure("  the same inside one cell", max(row["cell_over_lpt"] for row in rows), 1),
        Figure("balance: not proved optimal, <= 64 matrices", _open(small), 0),
        Figure("balance: not proved optimal, <= 5 costs", _open(few), 0),
        Figure("  not proved optimal, of all plans", _open(rows)),
        Figure(
            "  their makespan / lower bound, worst",
            max((row["over_bound"] for row in rows if row["optimum"] == "open"), default=1),
        ),
        Figure("  makespan / lower bound, worst of all models", max(r["over_bound"] for r in rows)),
    ]


def _open(rows: list[dict]) -> int:
    return sum(row["optimum"] == "open" for row in rows)
