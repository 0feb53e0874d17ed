"""Planning time against a heap-based LPT in Python.

Usage: python benchmarks/plan/bench_plan.py build/benchmarks/dmuon_plan_bench

Both start from names and shapes. The baseline computes costs and assigns owners; dmuon's time covers
the whole plan: sorting by name, checks, costs, assignment, local search, units, report and digest. Both
are CPU times of one thread, the best of several runs, interleaved.
"""

import heapq
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 10_000
REPEATS = 3


def cost(rows: int, cols: int) -> int:
    """Of Newton-Schulz with five steps, as in engine/cost.cpp."""
    s, n = min(rows, cols), max(rows, cols)
    direct = 15 * s * s * n + 5 * s**3
    gram = 3 * s * s * n + 17 * s**3 if s >= 128 else 6 * s * s * n + 14 * s**3
    flops = gram if gram * (1.1 if s >= 128 else 1.5) < direct else direct
    return flops // s * (s + 40) + 60 * s * n


def heap_lpt(matrices: list[tuple[str, int, int]], ranks: int) -> dict[str, int]:
    """Owner of each name: costliest first, to the least loaded rank."""
    heap = [(0, rank) for rank in range(ranks)]
    owners = {}
    for minus_cost, name in sorted((-cost(rows, cols), name) for name, rows, cols in matrices):
        load, rank = heap[0]
        owners[name] = rank
        heapq.heapreplace(heap, (load - minus_cost, rank))
    return owners


def python_ms(matrices: list[tuple[str, int, int]]) -> float:
    start = time.process_time()
    owners = heap_lpt(matrices, RANKS)
    elapsed = time.process_time() - start
    assert len(owners) == len(matrices)
    return 1e3 * elapsed


def measure(program: str) -> tuple[float, list[dict]]:
    baseline_ms, rows = float("inf"), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "names.tsv"
        for _ in range(REPEATS):
            out = subprocess.run([program, path], check=True, capture_output=True, text=True)
            new = [json.loads(line) for line in out.stdout.splitlines()]
            rows = [min(pair, key=lambda row: row["cpu_ms"]) for pair in zip(rows or new, new)]
            lines = (line.split("\t") for line in path.read_text().splitlines())
            matrices = [(name, int(rows), int(cols)) for name, rows, cols in lines]
            baseline_ms = min(baseline_ms, python_ms(matrices))
    return baseline_ms, rows


def main() -> None:
    baseline_ms, rows = measure(sys.argv[1])
    print("| list | matrices | ranks | plan, CPU ms | heap LPT in Python, ms | ratio |")
    print("|---|---|---|---|---|---|")
    row = rows[0]
    print(
        f"| {row['list']} | {row['matrices']} | {row['ranks']} | {row['cpu_ms']:.1f} "
        f"| {baseline_ms:.1f} | {baseline_ms / row['cpu_ms']:.1f} |"
    )
    print(
        "\n| list | matrices | ranks | tp | CPU ms | max/mean | makespan/bound | plain LPT/bound |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['list']} | {row['matrices']} | {row['ranks']} | {row['tp']} "
            f"| {row['cpu_ms']:.2f} | {row['max_over_mean']:.3f} "
            f"| {row['makespan_over_bound']:.4f} | {row['lpt_over_bound']:.4f} |"
        )


if __name__ == "__main__":
    main()
