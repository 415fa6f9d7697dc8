"""The commands `everywire config`: what is in force, what is wrong with it, and its schema."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from gateway.cli.config_check import as_json as problems_as_json
from gateway.cli.config_check import problems_of
from gateway.cli.options import CommandLine, configured, options
from gateway.cli.shadowing import check_directory
from gateway.config import Config
from gateway.config.environment import MODEL_FOLDER
from gateway.config.problem import FolderMissing
from gateway.config.schema import json_schema
from gateway.config.show import to_comments, to_json, to_toml
from gateway.config.text import Key


@click.group(
    "config",
    invoke_without_command=True,
    short_help="Print or check the configuration.",
    epilog="""
\b
Examples:
  everywire config                            every setting, and where it was set
  everywire config show --changed             those alone that somebody has set
  everywire config check --config everywire.toml
                                              all that is wrong with it, before anything is served
  everywire config schema > everywire.schema.json
                                              for editors
""",
)
@options
@click.pass_context
def config(context: click.Context, /, file: Any, models: Any, settings: Any, **flags: Any) -> None:
    """What a server would run with: the file, the environment and the flags together.

    Without a command of its own it is `config show`.
    """
    context.obj = context.obj.joined(CommandLine.of(file, models, settings, flags))
    if context.invoked_subcommand is None:
        context.invoke(show)


@config.command(
    short_help="Print every setting, and where it was set.",
    epilog="""
\b
Examples:
  everywire config show --config everywire.toml --port 9000
  everywire config show --changed
  everywire config show --json | jq '."listen.port".value'
""",
)
@configured
@click.option("--changed", is_flag=True, help="Only what somebody has set.")
@click.option("--show-secrets", is_flag=True, help="On a terminal: show api_key, passwords in URLs and such, too.")
@click.option("--json", "as_json", is_flag=True, help="One object: each setting with its value and its source.")
def show(given: CommandLine, changed: bool = False, show_secrets: bool = False, as_json: bool = False) -> None:
    """Print every setting as TOML, and behind each that is not a default where it was set: a file and its line, a variable
    of the environment, or a flag. What is printed is a configuration file again."""
    if show_secrets and not sys.stdout.isatty():
        raise click.UsageError("--show-secrets is for a terminal alone: secrets in a file or a pipe would stay there")
    resolved = given.resolve()
    said = _said_by_the_model(resolved.config)
    if as_json:
        click.echo(json.dumps(to_json(resolved, said, changed=changed, masked=not show_secrets), indent=2))
        return
    if said:
        click.echo("# Files of the model's own folder say:\n" + to_comments(said, masked=not show_secrets))
    elif not resolved.config.models and not resolved.config.repository.model:
        click.echo("# No model is configured: those of the library are served.\n")
    click.echo(to_toml(resolved, changed=changed, masked=not show_secrets), nl=False)


def _said_by_the_model(config: Config) -> list[tuple[Key, Any, str]]:
    """Of a model in a folder, what its model.toml and serving.properties say. Where there is no such folder that is told,
    and the rest is shown all the same: it may be there where this is to be served."""
    if not config.repository.model and not MODEL_FOLDER.is_dir():
        return []
    check_directory()
    from gateway.catalog.served_folder import folder_settings

    try:
        return list(folder_settings(config))
    except FolderMissing as e:
        click.echo(f"What the files of the model's own folder say is not shown: {e}", err=True)
        return []


@config.command(
    short_help="Name all that is wrong, and serve nothing.",
    epilog="""
\b
Examples:
  everywire config check --config everywire.toml
  everywire config check --config everywire.toml --import
  everywire config check --json | jq -r '.problems[].key'

\b
Exit status: 0 it can be served; 2 something is wrong.
""",
)
@configured
@click.option("--import", "imports", is_flag=True, help="Import the models' code too, and see whether it can be served.")
@click.option("--json", "as_json", is_flag=True, help="One object: ok, and problems.")
def check(given: CommandLine, imports: bool, as_json: bool) -> None:
    """Look at the whole configuration, and at the certificates and keys that it names, without serving. Each thing that is
    wrong has a line: where it is, what is expected, what came, and what was probably meant."""
    check_directory()
    problems = problems_of(given.resolve, models=imports)
    if as_json:
        click.echo(json.dumps(problems_as_json(problems), indent=2))
    elif problems:
        for problem in problems:
            click.echo(problem.text)
    elif imports:
        click.echo("The configuration can be served.")
    else:
        click.echo("No setting is wrong. The models are not imported: --import looks at them too.")
    click.get_current_context().exit(2 if problems else 0)


@config.command(
    short_help="Print the JSON schema of the TOML file.",
    epilog="""
\b
Examples:
  everywire config schema > everywire.schema.json

\b
Taplo and Even Better TOML then want this first line in everywire.toml:
  #:schema everywire.schema.json
""",
)
def schema() -> None:
    """Print the JSON schema (draft 7) of the configuration file: every setting with its type, its default, its range and
    what it means. Editors complete and check by it."""
    click.echo(json.dumps(json_schema(), indent=2))
