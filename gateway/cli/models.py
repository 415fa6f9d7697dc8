"""The commands `everywire models`, which call the operator plane of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote

import click

from gateway.addresses import reached_at
from gateway.cli.options import CommandLine
from gateway.config import OperatorConfig
from gateway.config.agreement import has_plane
from gateway.telemetry.log_text import report_lines, spoken_time
from gateway.untrusted_text import escape

if TYPE_CHECKING:
    from gateway.operator.client import PlaneClient

F = TypeVar("F", bound=Callable[..., Any])

DONE, FAILED, CUT, UNREACHABLE, INTERRUPTED = 0, 1, 3, 4, 130
"""Exit statuses; 2 is an invalid command line or configuration."""

EXIT_STATUS = """
\b
Exit status: 0 done; 1 refused, or it failed; 2 wrong command line; 3 a drain cut a stream;
4 no plane answers; 130 left by Ctrl-C.
"""


def _asking(function: F) -> F:
    """Adds the options of every command that calls the plane."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
        click.option(
            "--token-file",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="A file whose first line that is no comment is the token.  [default: operator.token, operator.token_file]",
        ),
        click.option(
            "--url", metavar="URL", help="The plane.  [default: operator.host and operator.port of this configuration]"
        ),
    ):
        function = option(function)
    return function


_interval = click.option(
    "--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two looks.",
)  # fmt: skip


def _command(name: str, short: str, *examples: str) -> Callable[[F], click.Command]:
    said = "\n  ".join(examples)
    return click.command(name, short_help=short, epilog=f"\n\b\nExamples:\n  {said}\n{EXIT_STATUS}")


@_command(
    "list",
    "The models of a running server, and how each fares.",
    "everywire --set operator.port=9000 models list",
    "EVERYWIRE_OPERATOR__PORT=9000 everywire models list chat",
    "everywire models list --url http://127.0.0.1:9000 --json | jq 'select(.queued > 0).name'",
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_asking
@click.pass_obj
def list_models(given: CommandLine, /, names: tuple[str, ...], as_json: bool, **where: Any) -> NoReturn:
    """List the models of a running server: those in service, those that are configured, and folders of its repository."""

    def asked(plane: PlaneClient) -> int:
        if names:
            models = [plane.ask("GET", f"/models/{quote(name)}") for name in names]
        else:
            models = plane.ask("GET", "/models")["models"]
        _tell(models, as_json, _MODEL, _model_row)
        return DONE

    _ask(given, where, asked)


_NAMES = click.argument("names", nargs=-1, required=True, metavar="NAME...")


@_command(
    "load",
    "Load models, each until it answers.",
    "everywire models load chat",
    "everywire models load --url http://127.0.0.1:9000 chat speech && ./warm-up",
)
@_NAMES
@_asking
@click.pass_obj
def load(given: CommandLine, /, names: tuple[str, ...], as_json: bool, **where: Any) -> NoReturn:
    """Load models of the configuration, or folders of the repository, one after the other. Returns when they take calls. A
    model that does already is left as it is."""
    _change(given, where, "load", names, as_json, {})


@_command(
    "unload",
    "Take models out of service.",
    "everywire models unload chat",
    "everywire models unload chat && everywire models load chat",
)
@_NAMES
@_asking
@click.pass_obj
def unload(given: CommandLine, /, names: tuple[str, ...], as_json: bool, **where: Any) -> NoReturn:
    """Take models out of service, one after the other. Returns when nothing of them is left. Running calls have
    `repository.unload_timeout` to end."""
    _change(given, where, "unload", names, as_json, {})


@_command(
    "reload",
    "Load models anew while they serve.",
    "everywire models reload chat",
    "everywire models reload chat --patience 5",
)
@_NAMES
@click.option(
    "--patience",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="How long calls of the old version may go on.  [default: the server's repository.unload_timeout]",
)
@_asking
@click.pass_obj
def reload(given: CommandLine, /, names: tuple[str, ...], as_json: bool, patience: float | None, **where: Any) -> NoReturn:
    """Load models anew, one after the other. Each answers meanwhile; if the new version cannot be loaded, the old one serves
    on. The answer says if the code was not read again, and what to do."""
    _change(given, where, "reload", names, as_json, {"patience": patience})


@_command(
    "restart",
    "Put a new process in the place of one of a model's.",
    "everywire models restart chat --instance 1",
    "everywire models list chat --json | jq .instances",
)
@click.argument("name", metavar="NAME")
@click.option(
    "--instance",
    type=click.IntRange(0),
    required=True,
    metavar="NUMBER",
    help="Which of its processes, as `list --json` numbers them from 0.",
)
@_asking
@click.pass_obj
def restart(given: CommandLine, /, name: str, instance: int, as_json: bool, **where: Any) -> NoReturn:
    """Put a new process in the place of one that a model runs in. Returns when the new one takes calls; calls of the old one
    have the server's `repository.unload_timeout` to end. If the new one cannot be started, the old one goes on."""
    _change(given, where, f"instances/{instance}/restart", [name], as_json, {})


@_command(
    "live",
    "What streams are live, and what each waits for.",
    "everywire models live",
    "everywire models live --follow",
    "everywire models live --json | jq 'select(.waits_for == \"room\").peer'",
)
@click.option("--follow", is_flag=True, help="Say what opens, changes and closes, until the server ends.")
@_interval
@_asking
@click.pass_obj
def live(given: CommandLine, /, follow: bool, interval: float, as_json: bool, **where: Any) -> NoReturn:
    """List what is live on a running server, the oldest first, and what each stream waits for: a slot, the model, input of
    its client, room (its client does not read) or the end (its client has yet to take it)."""

    def asked(plane: PlaneClient) -> int:
        if not follow:
            told = plane.ask("GET", "/streams")
            _tell(told["streams"], as_json, _STREAM, _stream_row)
            if told["live"] > len(told["streams"]) and not as_json:
                click.echo(f"and {told['live'] - len(told['streams'])} more, which are younger")
            return DONE
        states: list[str] = []
        for name, data in plane.events(f"/streams/events?interval={interval:g}"):
            if name == "stats":  # which come each second
                continue
            if as_json:
                click.echo(json.dumps({"event": name, "data": data}))
                continue
            said = list(_event_lines(name, data))
            if name == "models":  # which come with each slot that is taken
                if said == states:
                    continue
                states = said
            for line in said:
                click.echo(line)
        return DONE

    _ask(given, where, asked)


@_command(
    "drain",
    "Drain the server, and report.",
    "everywire models drain",
    "everywire models drain --timeout 5 --json",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="How long what is live may go on.  [default: the server's drain.timeout]",
)
@click.option("--no-wait", is_flag=True, help="Return when it has begun, without the report.")
@_asking
@click.pass_obj
def drain(given: CommandLine, /, timeout: float | None, no_wait: bool, as_json: bool, **where: Any) -> NoReturn:
    """Drain a running server as SIGTERM does, and print how each live stream ended. The process then ends. While it drains,
    a second call can shorten the time that is left."""

    def asked(plane: PlaneClient) -> int:
        report = plane.ask("POST", "/drain", {"timeout": timeout, "wait": not no_wait})["report"]
        if as_json:
            click.echo(json.dumps({"draining": True, "report": report}))
        elif report is None:
            click.echo("draining")
        else:
            for line in report_lines(report):
                click.echo(line)
        return CUT if report is not None and report["cut"] else DONE

    _ask(given, where, asked)


COMMANDS = (list_models, load, unload, reload, restart, live, drain)


@_command(
    "top",
    "Who is slow: a running server at a glance.",
    "everywire --set operator.port=8090 top",
    "everywire top --url http://127.0.0.1:8090",
    "everywire top --url http://127.0.0.1:8090 --once",
    "everywire top --url http://127.0.0.1:8090 --json | jq -r .verdict.sentence",
)
@click.option("--once", is_flag=True, help="Print one frame.  [default: where standard output is no terminal]")
@_interval
@_asking
@click.pass_obj
def top(given: CommandLine, /, once: bool, interval: float, as_json: bool, **where: Any) -> NoReturn:
    """Say who is slow on a running server: the verdict, the bar of parts that proves it, and how each model fares, all of
    the last minute; which streams have waited longest now. It changes nothing.

    Keys: q quits, s sorts streams by another column, f shows those that wait for one thing alone, p pauses."""

    def asked(plane: PlaneClient) -> int:
        from gateway.cli.top import screen

        if as_json:
            for name, data in plane.events(f"/streams/events?interval={interval:g}"):
                if name == "stats":
                    click.echo(json.dumps(data))
                    if once:
                        break
        elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            click.echo("\n".join(screen.once(plane)))
        else:
            screen.watch(plane, interval)
        return DONE

    _ask(given, where, asked)


# ---- asking ----


def _ask(given: CommandLine, where: Mapping[str, Any], asked: Callable[[PlaneClient], int]) -> NoReturn:
    """Calls `asked` with the plane, and ends the program with its exit status."""
    from gateway.operator.client import PlaneClient, PlaneRefused, Unreachable

    chosen = given.resolve().config.operator
    url = where["url"] or _own_url(chosen)
    try:
        plane = PlaneClient(url, _token(where["token_file"], chosen))
    except ValueError as e:
        raise click.UsageError(f"--url: {e}") from None
    try:
        status = asked(plane)
    except PlaneRefused as e:
        _complain(str(e))
        status = FAILED
    except Unreachable as e:
        _complain(f"no operator plane answers: {e}")
        status = UNREACHABLE
    except KeyboardInterrupt:
        status = INTERRUPTED
    click.get_current_context().exit(status)


def _change(
    given: CommandLine, where: Mapping[str, Any], what: str, names: Iterable[str], as_json: bool, body: Mapping[str, Any]
) -> NoReturn:
    """Asks for the change for each model, one after the other; goes on if one is refused."""

    def asked(plane: PlaneClient) -> int:
        from gateway.operator.client import PlaneRefused

        status = DONE
        for name in names:
            try:
                model = plane.ask("POST", f"/models/{quote(name)}/{what}", body)
            except PlaneRefused as e:
                _complain(str(e))
                status = FAILED
            else:
                click.echo(json.dumps(model) if as_json else f"{escape(model['name'])}: {model['state']}")
                if "code" in model and not as_json:
                    click.echo(f"{escape(model['name'])}: {escape(model['code'])}", err=True)
        return status

    _ask(given, where, asked)


def _own_url(chosen: OperatorConfig) -> str:
    """The URL at which the plane of a server with this configuration listens."""
    if url := reached_at(chosen.host, chosen.port):
        return url
    if not has_plane(chosen):
        raise click.UsageError(
            "No operator plane to ask. Start the server with --set operator.port=8090, or give --url http://HOST:PORT."
        )
    setting = "operator.port names no port" if chosen.port == 0 else "operator.host names no address"
    raise click.UsageError(f"Which operator plane? {setting}: give --url; the server's log says where its plane is.")


def _token(file: Path | None, chosen: OperatorConfig) -> str:
    if file is None and chosen.token:
        return chosen.token
    path = file or (Path(chosen.token_file) if chosen.token_file else None)
    if path is None:
        return ""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise click.UsageError(f"the token cannot be read from {path}: {getattr(e, 'strerror', None) or e}") from None
    return next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")


def _complain(text: str) -> None:
    click.echo(f"Error: {escape(text)}", err=True)


# ---- telling ----

_MODEL = ("NAME", "STATE", "FOR", "SLOTS", "QUEUED", "RESTARTS", "LAST ERROR")
_STREAM = ("ID", "MODEL", "WIRE", "DIALECT", "WAITS FOR", "AGE", "IDLE", "IN", "OUT", "PEER")


def _tell(
    rows: list[dict[str, Any]], as_json: bool, head: tuple[str, ...], row_of: Callable[[dict[str, Any]], tuple[str, ...]]
) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    table = [head, *(tuple(map(escape, row_of(row))) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    if "capacity" not in model:
        return model["name"], model["state"], "", "", "", "", model["reason"]
    error = model["last_error"]
    said = f"{error['error']} ({spoken_time(error['ago'])} ago, incident {error['incident']})" if error else model["reason"]
    return (
        model["name"], model["state"], spoken_time(model["seconds"]), f"{model['slots_in_use']}/{model['capacity']}",
        str(model["queued"]), str(model["restarts"]), said,
    )  # fmt: skip


def _stream_row(stream: dict[str, Any]) -> tuple[str, ...]:
    return (
        stream["id"], stream["model"], stream["wire"], stream["dialect"], stream["waits_for"], spoken_time(stream["age"]),
        spoken_time(stream["idle"]), str(stream["bytes_in"]), str(stream["bytes_out"]), stream["peer"],
    )  # fmt: skip


def _event_lines(name: str, data: Any) -> Iterable[str]:
    match name:
        case "models":
            yield "models   " + ", ".join(f"{model['name']} {model['state']}" for model in data)
        case "dropped":
            yield f"dropped  {data['closed']} that have closed"
        case "incident":
            said = f"{data['id']}  {data['model']}  {data['count']} times  {data['error']}  at {data['place']}"
            yield f"incident {escape(said)}"
        case "draining":
            yield f"draining {data['live']} were live, {sum(data['ended'].values())} have ended, {data['refused']} refused"
        case "drained":
            yield from report_lines(data)
        case _ if "model" not in data:
            yield f"{name:<8} {data['id']}"
        case _:
            how = data.get("ending") or f"waits for {data['waits_for']}"
            said = f"{data['id']}  {data['model']}  {data['wire']}  {how}  in {data['bytes_in']} out {data['bytes_out']}"
            yield f"{name:<8} {escape(said)}"
