"""`python -m benchmarks`."""

import signal
import sys

from benchmarks.cli import program

if __name__ == "__main__":
    # leaving by an exception is what ends the servers that were started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    program(prog_name="python -m benchmarks")
