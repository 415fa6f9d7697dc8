"""`python -m gateway`: the command line."""

from gateway.cli.main import main

if __name__ == "__main__":  # some tools import every module of a package
    main()
