"""`python -m gateway`: the command line."""

from gateway.cli import main

main()
