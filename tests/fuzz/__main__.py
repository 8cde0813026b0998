"""`python -m tests.fuzz`: run thousands of damaged inputs and print the outcomes as JSON."""

import argparse
import sys
from pathlib import Path

import msgspec

from tests.fuzz.fuzzer import FINE, Case, fuzz
from tests.fuzz.seeds import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="number of inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME,…",
        help="only kinds of input with one of these in the name, such as kineto,ncu",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/fuzz", help="where to save inputs that fail (default: build/fuzz)"
    )
    given = parser.parse_args()
    done = 0

    def tell(case: Case) -> None:
        nonlocal done
        done += 1
        if case.class_ not in FINE:
            sys.stderr.write(f"{case.class_}: {case.cause}: input {case.number}: stepscope {' '.join(case.command)}\n")
        elif done % 1000 == 0:
            sys.stderr.write(f"{done} of {given.count}\n")

    summary = fuzz(
        count=given.count,
        seed=given.seed,
        first=given.first,
        jobs=given.jobs,
        only=given.only,
        kept=given.out,
        on_case=tell,
    )
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n")
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
