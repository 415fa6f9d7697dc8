"""`python -m tests.attacks`: runs attacks, prints what they came to, and fails where something does not hold."""

from __future__ import annotations

import argparse
import sys

from benchmarks.accounting import allow_descriptors
from benchmarks.report import machine
from tests.attacks.attack import Attack, attacks
from tests.attacks.run import Row, broken, run
from tests.attacks.table import as_csv, text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help="those whose name begins so")
    parser.add_argument("--list", action="store_true", help="print the attacks and what each does")
    parser.add_argument("--all", action="store_true", help="all of them, with the collector on and off")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each [10]")
    parser.add_argument("--seed", type=int, default=0, help="of sizes and rates [0]")
    parser.add_argument("--no-gc", action="store_true", help="with the server's garbage collector off")
    parser.add_argument("--processes", type=int, default=1, help="of the server, `listen.processes` [1]")
    parser.add_argument("--csv", action="store_true", help="print the figures as CSV, with day and machine")
    given = parser.parse_args()
    known = attacks()
    if given.list:
        width = max(map(len, known))
        print("\n".join(f"{attack.name:{width}}  {attack.what}" for attack in known.values()))
        return 0
    chosen = [attack for name, attack in known.items() if given.all or name.startswith(tuple(given.names))]
    if not chosen:
        parser.error(f"name some of these, or --all: {', '.join(known)}")
    allow_descriptors(32768)
    rows, failures = list[Row](), list[str]()
    for attack in chosen:
        for collector in (True, False) if given.all else (not given.no_gc,):
            print(f"{attack.name}, collector {'on' if collector else 'off'}", file=sys.stderr)
            row, said = _judged(attack, collector, given)
            rows.append(row)
            failures += [f"{attack.name}, collector {'on' if collector else 'off'}: {what}" for what in said]
    print(as_csv(rows, machine()) if given.csv else text(rows), end="" if given.csv else "\n")
    print("\n".join(failures), file=sys.stderr)
    return bool(failures)


def _judged(attack: Attack, collector: bool, given: argparse.Namespace) -> tuple[Row, list[str]]:
    row = run(
        attack, seconds=given.seconds, seed=given.seed, collector=collector, to_the_end=True, processes=given.processes
    )  # fmt: skip
    return row, broken(attack, row, times=True)


if __name__ == "__main__":
    sys.exit(main())
