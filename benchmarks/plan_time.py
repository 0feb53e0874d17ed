"""Planning 100,000 matrices on 10,000 ranks, beside a heap-based LPT in Python, in CPU time."""

import os
from pathlib import Path

from plan import bench_plan
from support import Figure

PROGRAM = Path(__file__).parents[1] / "build" / "benchmarks" / "dmuon_plan_bench"


def measure() -> list[Figure]:
    baseline_ms, rows = bench_plan.measure(os.environ.get("DMUON_PLAN_BENCH", PROGRAM))
    largest = rows[0]["cpu_ms"]
    worst = max(row["makespan_over_bound"] / row["lpt_over_bound"] for row in rows)
    return [
        Figure("plan: 100,000 matrices on 10,000 ranks, ms of CPU", largest, 50),
        Figure("plan: its time / a heap-based LPT in Python", largest / baseline_ms, 1 / 8),
        Figure("  the LPT in Python, ms of CPU", baseline_ms),
        Figure("plan: longest rank's cost / plain LPT's, worst of all lists", worst, 1),
    ]
