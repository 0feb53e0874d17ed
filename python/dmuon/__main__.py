"""``python -m dmuon plan`` and ``python -m dmuon doctor``."""

import argparse
import contextlib
import json
import os
import sys

from dmuon import doctor, planning, shapes
from dmuon.pictures import plan_picture, plan_table

_TOO_MUCH = 9e9  # GB: bytes that 63 bits do not hold


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        status = given.run(given)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"dmuon {given.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of any program that SIGPIPE ends


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dmuon", description="Muon with one owner rank per matrix."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", help="owners, balance, memory and bytes of a model on a topology"
    )
    plan.add_argument(
        "model",
        help="config.json, .safetensors or its index, a directory that holds one of them, or module:function",
    )
    plan.add_argument(
        "topology", help='"replicate=8 shard=16 tp=8"; an axis that is left out has one rank'
    )
    plan.add_argument(
        "--include",
        nargs="*",
        default=[],
        metavar="GLOB",
        help="default: matrices of repeated blocks",
    )
    plan.add_argument("--exclude", nargs="*", default=[], metavar="GLOB")
    plan.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of forward and backward",
    )
    plan.add_argument("--ranks", type=count, help="check that the axes multiply out to it")
    plan.add_argument(
        "--memory-limit",
        type=positive_number,
        metavar="GB",
        help="of weight and state on one owner",
    )
    plan.add_argument("--max-owners-per-group", type=count, default=0)
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--picture", metavar="FILE", help="ranks x load, as .png, .svg or .pdf")
    plan.set_defaults(run=_plan)
    check = commands.add_parser(
        "doctor", help="versions, backends, kernels and a self-test; what to do about them"
    )
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=lambda given: doctor.run(as_json=given.json))
    return parser


def _plan(given) -> int:
    topology = planning.read_topology(given.topology)
    planning.check_ranks(topology, given.ranks)
    found = shapes.read_shapes(given.model)
    chosen = planning.choose(found, given.include, given.exclude)
    limit = int((given.memory_limit or 0) * 1e9)
    planned = planning.plan(found, chosen, topology, given.dtype, limit, given.max_owners_per_group)
    if given.picture:
        plan_picture(planned, given.picture)
    print(json.dumps(planned.as_dict()) if given.json else plan_table(planned))
    return 0


def positive_number(text: str) -> float:
    return _above(0, float, text, "number above 0 and below 9e9")


def count(text: str) -> int:
    return _above(0, int, text, "whole number of at least 1")


def _above(low, kind: type, text: str, wanted: str):
    with contextlib.suppress(ValueError):
        value = kind(text)
        if low < value < _TOO_MUCH:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is given; it must be a {wanted}")


if __name__ == "__main__":
    sys.exit(main())
