"""The balance of plans of known models on 8 to 10,000 ranks, as a markdown table.

Usage: python benchmarks/plan/balance.py [build/benchmarks/dmuon_plan_balance]
"""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "build" / "benchmarks" / "dmuon_plan_balance"
HEADER = (
    "model (matrices)",
    "ranks",
    "shard x replicate x tp",
    "makespan / bound",
    "LPT / bound",
    "optimum",
    "state max/mean",
    "state max/bound",
)


def measure(program: Path | str = PROGRAM) -> list[dict]:
    """One row per plan. The program fails where a plan breaks a rule that all plans keep."""
    out = subprocess.run([program], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in out.stdout.splitlines()]


def ranks(row: dict) -> int:
    return row["shard"] * row["replicate"] * row["tp"]


def cells(row: dict) -> list[str]:
    return [
        f"{row['model']} ({row['matrices']:,})",
        f"{ranks(row):,}",
        f"{row['shard']:,} x {row['replicate']:,} x {row['tp']}",
        f"{row['over_bound']:.6f}",
        f"{row['lpt_over_bound']:.6f}",
        row["optimum"],
        f"{row['state_over_mean']:.3f}",
        f"{row['state_over_bound']:.3f}",
    ]


def main() -> None:
    rows = [HEADER, ["---"] * len(HEADER), *map(cells, measure(*sys.argv[1:]))]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()
