"""The commands `everywire keys`: make a client's key, print the line of an existing one, and check a file of keys."""

from __future__ import annotations

import sys

import click

from gateway.config.watched_file import WatchedFile
from gateway.keys import LARGEST, KeyFileError, line_of, new_key, read_keys
from gateway.untrusted_text import escape

_LONGEST = 8192  # characters that are read as a key from standard input, at most


@click.group(
    short_help="Make and check keys of clients.",
    epilog="""
\b
Examples:
  everywire keys new alice models=chat,embed-* rate=20 2>> keys
                                              prints a key, and adds its line to the file
  everywire keys digest ops scope=control < key >> keys
                                              the line of an existing key
  everywire keys check keys                   all problems of a file
""",
)
def keys() -> None:
    """Make and check keys of clients. `access.keys_file` names the file that has their digests, one a line."""


@keys.command(
    short_help="Make a key.",
    epilog="""
\b
Examples:
  everywire keys new alice 2>> keys
  everywire keys new bob models=chat,embed-* rate=20 expires=2027-01-31 > bob.key 2>> keys
""",
)
@click.argument("name")
@click.argument("attributes", nargs=-1, metavar="[ATTRIBUTE=VALUE]...")
def new(name: str, attributes: tuple[str, ...]) -> None:
    """Print a new key to standard output, once, and its line for the file to standard error.

    The attributes are those of the file: models, scope, share, in_flight, rate, priority, expires.
    """
    made = new_key()
    line = _line(name, made, attributes)
    click.echo(made)
    click.echo(line, err=True)


@keys.command(
    short_help="Print the line of a key.",
    epilog="""
\b
Examples:
  everywire keys digest ops scope=control < ops.key >> keys
""",
)
@click.argument("name")
@click.argument("attributes", nargs=-1, metavar="[ATTRIBUTE=VALUE]...")
def digest(name: str, attributes: tuple[str, ...]) -> None:
    """Print the line for the file of a key that is read from standard input."""
    said = sys.stdin.read(_LONGEST)
    click.echo(_line(name, said.removesuffix("\n").removesuffix("\r"), attributes))


@keys.command(
    short_help="Check a file of keys.",
    epilog="""
\b
Examples:
  everywire keys check keys
""",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def check(file: str) -> None:
    """Print the problems of a file of keys, one a line. Exit status 1 if there are any."""
    watched = WatchedFile(file, LARGEST)
    try:
        found = read_keys(watched.read())
    except KeyFileError as e:
        for problem in e.problems:
            click.echo(f"{escape(file)}: {problem}", err=True)
        raise click.exceptions.Exit(1) from None
    except OSError as e:
        raise click.ClickException(f"{escape(file)} cannot be read: {e.strerror}") from None
    if watched.read_by_others:
        click.echo(f"{escape(file)}: its mode lets others read it", err=True)
    names = len({key.name for key in found})
    click.echo(f"{len(found)} key{'s' * (len(found) != 1)} of {names} name{'s' * (names != 1)}")


def _line(name: str, key: str, attributes: tuple[str, ...]) -> str:
    try:
        return line_of(name, key, attributes)
    except ValueError as e:
        raise click.UsageError(str(e)) from None
