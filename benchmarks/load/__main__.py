"""The load client's process: a plan comes in on stdin, a result or an error in words goes out on stdout, as JSON."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict

from benchmarks.accounting import UnknownCostError
from benchmarks.load.client import run
from benchmarks.load.connections import LoadError

if __name__ == "__main__":
    plan = pickle.load(sys.stdin.buffer)  # our own parent wrote it: it may hold 16 MiB of request
    try:
        print(json.dumps(asdict(run(plan))))
    except (LoadError, UnknownCostError) as error:
        print(json.dumps({"error": str(error)}))
