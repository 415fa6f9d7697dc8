"""The commands `everywire config`: print the settings in force, check them, and print their schema."""

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
  everywire config show --changed             only those that are set
  everywire config check --config everywire.toml
                                              all problems, before anything is served
  everywire config schema > everywire.schema.json
                                              for editors
""",
)
@options
@click.pass_context
def config(context: click.Context, /, file: Any, models: Any, settings: Any, **flags: Any) -> None:
    """Print or check the configuration that a server would run with: the file, the environment and the flags together.

    Without a command, this is `config show`.
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
@click.option("--changed", is_flag=True, help="Only settings that are set.")
@click.option("--show-secrets", is_flag=True, help="On a terminal: show secrets too, such as api_key and passwords in URLs.")
@click.option("--json", "as_json", is_flag=True, help="One object: each setting with its value and its source.")
def show(given: CommandLine, changed: bool = False, show_secrets: bool = False, as_json: bool = False) -> None:
    """Print every setting as TOML. Each one that is set has its source behind it: a file and its line, an environment
    variable, or a flag. The output is a valid configuration file."""
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
    """The settings in the model.toml and serving.properties of a model in a folder. If the folder is missing, says that on
    stderr and returns none: it may exist where this configuration will be served."""
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
    """Check the whole configuration, and the certificates and keys that it names, without serving. Each problem has one
    line: its place, the expected and the actual value, and the value that was probably meant."""
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
    """Print the JSON schema (draft 7) of the configuration file: every setting with its type, default, range and meaning.
    Editors use it to complete and check the file."""
    click.echo(json.dumps(json_schema(), indent=2))
