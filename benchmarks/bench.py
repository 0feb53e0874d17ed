"""Runs all figures and prints one table: figure, measured, limit, met.

    python benchmarks/bench.py [--only host_time] [--json figures.json]

Ends with status 1 if a limit is not met or a subject fails.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

SUBJECTS = (
    *("host_time", "step_time", "wire_bytes", "memory", "parity", "plan_time"),
    "ns_accuracy",
    *("mesh", "mesh_tp", "mesh_time", "ddp", "fsdp2_peers", "zero", "zero_peer", "checkpoints"),
)


def main() -> int:
    arguments = parse_arguments()
    figures, failed = [], []
    print(f"{'figure':<66} {'measured':>10} {'limit':>9}  met")
    for subject in arguments.only or SUBJECTS:
        try:
            figures += run(subject)
        except Exception:  # the other subjects are still worth their figures
            failed.append(subject)
            print(f"-- {subject} FAILED\n{traceback.format_exc(limit=-1)}", flush=True)
    if arguments.json:
        told = [vars(figure) | {"met": figure.met} for figure in figures]
        arguments.json.write_text(json.dumps(told, indent=1))
    missed = [figure.name for figure in figures if figure.met is False]
    print(f"\n{len(figures)} figures, {len(missed)} limits not met, {len(failed)} subjects failed")
    return 1 if missed or failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=SUBJECTS)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def run(subject: str) -> list:
    started = time.monotonic()
    figures = importlib.import_module(subject).measure()
    print(f"-- {subject} ({time.monotonic() - started:.0f} s)")
    for figure in figures:
        print(line(figure), flush=True)
    return figures


def line(figure) -> str:
    limit = "" if figure.limit is None else f"{figure.limit:.3g}"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    return f"{figure.name:<66} {figure.measured:>10.4g} {limit:>9}  {met}"


if __name__ == "__main__":
    sys.exit(main())
