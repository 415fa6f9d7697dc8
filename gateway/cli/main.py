"""The command line: `everywire`, or `python -m gateway`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import click

from gateway.addresses import reached_at
from gateway.cli.config import config
from gateway.cli.config_check import reason_of
from gateway.cli.keys import keys
from gateway.cli.models import COMMANDS, EXIT_STATUS, top
from gateway.cli.options import NAMES, CommandLine, configured, options
from gateway.cli.plan import plan_command
from gateway.cli.shadowing import check_directory
from gateway.cli.start.new import KINDS, make
from gateway.config import TLSConfig
from gateway.config.load import PREFIX
from gateway.config.problem import ConfigError
from gateway.config.share import processes_of
from gateway.config.text import parse_duration
from gateway.telemetry import logging_setup
from gateway.version import version

# Nothing of `models` or of the server is imported before `check_shadowing` has looked.
if TYPE_CHECKING:
    from models.spec import ModelSpec, TensorSpec

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("gateway.cli")

_WIRES = ("lmi", "openai", "v2", "generate", "grpc", "invoke", "stream", "bidi", "websocket", "container")
"""The values of `gateway.cli.call.plan.CallWire`, which is imported too late for a choice."""
_FLEETS = ("zone", "cell", "rollout", "storm", "age", "all")
"""The names in `gateway.testing.fleet.scenarios.SCENARIOS`, and `all`."""


_EPILOG = f"""
\b
Examples:
  everywire                                   serve the library models on port 8080
  everywire new greeter                       make a folder with a model and its tests
  everywire dev app.py                        serve the models of app.py, anew at each change
  everywire --model app.py                    serve the model of app.py
  everywire --model chat=app:generate         serve the function `generate` of app.py as "chat"
  everywire --config everywire.toml --port 0  a file, and a flag that overrides it
  everywire --tls-dev                         HTTP/2 over TLS on port 8443, for localhost
  everywire --set limits.body=64MiB           any setting there is
  everywire config show --config everywire.toml
                                              what is in force, and where each value was set
  everywire config check --config everywire.toml
                                              all that is wrong with it
  everywire keys new alice                    a key of a client, and its line for the file of keys
  everywire demo --once                       a tour of the wires, then exit
  everywire emulate sagemaker --container ws://127.0.0.1:8081
                                              SageMaker's front before your own container
  everywire simulate --seeds 0..999           disasters in memory, each by its seed
  everywire plan --streams 256 --rate 50      how many gateways a load needs
  everywire call lm "Return the"              calls a model of a server, and prints as it arrives
  everywire top --url http://127.0.0.1:8090   who is slow on a running server
  everywire models list                       asks a server's operator plane how its models fare

\b
A later source overrides an earlier one:
  defaults, the file, {PREFIX}SECTION__KEY=VALUE, flags.
"""


@final
class _Failure(click.ClickException):
    exit_code = 2


@final
class _Program(click.Group):
    """A group whose errors are one line, with exit status 2."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return _in_one_line(lambda: super(_Program, self).make_context(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        return _in_one_line(lambda: super(_Program, self).invoke(ctx))


T = TypeVar("T")


def _in_one_line(call: Callable[[], T]) -> T:
    try:
        return call()
    except ConfigError as error:
        raise _Failure(str(error)) from None
    except BaseExceptionGroup as group:
        raise _only_configuration(group) from None
    except click.UsageError as error:
        # Without its context: click would print the usage before it.
        raise click.UsageError(_misplaced(error) or error.format_message()) from None


def _misplaced(error: click.UsageError) -> str:
    """The advice for an option that is valid, but not in this place; empty for any other error."""
    if not isinstance(error, click.NoSuchOption) or error.option_name not in NAMES or error.ctx is None:
        return ""
    name, command = error.option_name, error.ctx.command_path.removeprefix(error.ctx.find_root().command_path).strip()
    return f"{name} stands before the command: everywire {name} ... {command}"


def _only_configuration(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure for a group that has only ConfigErrors, which a server's nurseries wrap; any other group as it is."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return _Failure(str(first)) if isinstance(first, ConfigError) and group.split(ConfigError)[1] is None else group


@click.group(
    cls=_Program,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@options
@click.version_option(version(), prog_name="everywire")
@click.pass_context
def program(
    context: click.Context, /, file: Path | None, models: tuple[str, ...], settings: tuple[str, ...], **flags: Any
) -> None:
    """Serve models over HTTP/1.1, HTTP/2 and WebSocket: SageMaker, KServe/Triton v2 and LMI, with
    backpressure from the socket to the model.

    Without a command it serves. Without a model of yours it serves those of its library: echo, identity, add_sub, lm and
    speech.
    """
    context.obj = given = CommandLine.of(file, models, settings, flags)
    if context.invoked_subcommand is None:
        _serve(context, given)


program.add_command(config)
program.add_command(keys)
program.add_command(plan_command)
program.add_command(top)


@program.command(
    short_help="Serve; the same as no command.",
    epilog="""
\b
Examples:
  everywire serve --model chat=app:generate
  everywire serve --config everywire.toml --port 9000

\b
Exit status: 0 drained, and everything ended by itself; 1 it could not start, or not go on
without a model; 2 wrong command line or configuration; 3 a stream was cut at the deadline.
""",
)
@configured
def serve(given: CommandLine) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `everywire` without a command does this too."""
    _serve(click.get_current_context(), given)


@program.command(
    short_help="Serve the models of a file, and anew when it changes.",
    epilog="""
\b
Examples:
  everywire dev app.py
  everywire dev app.py --port 9000
  everywire dev app.py --config everywire.toml

\b
Exit status: 0 stopped; 1 it could not start; 2 wrong command line, configuration or file.
""",
)
@click.argument("source", metavar="FILE")
@configured
def dev(given: CommandLine, source: str) -> None:
    """Serve all models that FILE defines, each by its name, with a console on a free port of this machine, and start
    anew when the file, or code that it imports from this folder, changes. Not for production: a change cuts running
    calls.

    If a change cannot be served, for example because of a syntax error, the log shows why, and the old code serves on."""
    check_directory()
    from gateway.cli.start.dev import run_dev

    click.get_current_context().exit(run_dev(given, source))


@program.command(
    short_help="Make a folder with a model, its tests and its settings.",
    epilog="""
\b
Examples:
  everywire new greeter
  everywire new meter --kind audio

\b
Kinds: text, a generator of tokens; chat, with a template for messages; tensor, arrays in and out;
audio, parts in both directions; rolling, a batch that sequences join and leave.
""",
)
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="text", show_default=True, help="What the model takes.")
@click.pass_obj
def new(given: CommandLine, folder: Path, kind: str) -> None:
    """Make the folder NAME with app.py, test_app.py and everywire.toml. A folder that is not empty is refused."""
    if given.anything:
        raise click.UsageError("new takes only its own options, after its name: see `everywire new --help`")
    click.echo(make(folder, kind), nl=False)


@program.command(
    short_help="Take a tour of the wires.",
    epilog="""
\b
Examples:
  everywire demo                              the tour, and a server to try more on
  everywire demo --once                       the tour alone

\b
Exit status: 0 every step worked; 1 one did not.
""",
)
@click.option("--once", is_flag=True, help="Exit after the tour instead of serving on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port to listen on.")
@click.pass_obj
def demo(given: CommandLine, once: bool, port: int) -> None:
    """Start a gateway with the library models and call each of them over every wire."""
    if given.anything:
        raise click.UsageError("demo takes only its own options, after its name: see `everywire demo --help`")
    check_directory()
    from gateway.cli.demo import run

    click.get_current_context().exit(run(once=once, port=port, echo=click.echo))


@program.command(
    short_help="Play seeded disasters, and check what is promised.",
    epilog="""
\b
Examples:
  everywire simulate                          the seeds 0 to 99
  everywire simulate --seeds 17..17 --trace trace.txt
                                              one seed, and all that happened
  everywire simulate --seeds 0..999 --json    one JSON object a seed, and one for all of them
  everywire simulate --fleet zone --seeds 0..9
                                              1,000 gateways as counters: a zone is lost
""",
)
@click.option("--seeds", default="0..99", show_default=True, metavar="A..B", help="The first and the last.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write every event there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--twice", is_flag=True, help="Play each seed twice and demand the same trace.")
@click.option(
    "--fleet", type=click.Choice(_FLEETS), metavar="SCENARIO", help=f"Play a fleet of gateways: {', '.join(_FLEETS)}."
)
@click.pass_obj
def simulate(given: CommandLine, seeds: str, trace: Path | None, as_json: bool, twice: bool, fleet: str | None) -> None:
    """Play whole gateways in memory: clients on every wire, models and a network, all with faults that a seed decides.

    At every step the promises are checked: messages in order and none lost, one ending for each exchange, nothing held
    for ever, no neighbour harmed, drains that end. For each failure the command that repeats it is printed. Exit status 1
    if there is any.

    With --fleet it plays 1,000 gateways as counters and 170,000 clients, which lose their gateways and connect to others.
    The size is that of `everywire plan --streams 170000 --rate 50`.
    """
    if given.anything:
        raise click.UsageError("simulate takes only its own options, after its name: see `everywire simulate --help`")
    first, found, last = seeds.partition("..")
    if not (found and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise click.UsageError(f"--seeds takes A..B, such as 0..99, not {seeds[:100]!r}")
    check_directory()
    if fleet is not None:
        if trace is not None or twice:
            raise click.UsageError("--fleet has no trace: leave out --trace and --twice")
        from gateway.cli.simulate_fleet import run

        click.get_current_context().exit(run(fleet, range(int(first), int(last) + 1), click.echo, as_json=as_json))
    from gateway.cli.simulate import Campaign

    campaign = Campaign(click.echo, lambda line: click.echo(line, err=True), trace=trace, as_json=as_json, twice=twice)
    click.get_current_context().exit(campaign.run(range(int(first), int(last) + 1)))


@program.command(
    short_help="Call a model of a running server.",
    epilog="""
\b
Examples:
  everywire call lm "Return the"              text, token by token
  everywire call lm - --param max_new_tokens=50 < prompt.txt
  everywire call lm "Hi" --wire openai --no-stream
  everywire call add_sub --tensor INPUT0=a.npy --tensor INPUT1=b.npy
  everywire call identity --tensor INPUT0=a.npy --out b.npy
  everywire call identity --tensor INPUT0=a.npy --wire grpc --url http://localhost:8001
  everywire call speech --wav speech.wav      audio, over HTTP/2 in parts of 100 ms
  arecord -f S16_LE -r 16000 | everywire call speech --file -
  everywire call echo "hello" "every" "wire" --wire websocket
  everywire call lm "Hi" --url https://localhost:8443 --wire bidi --json

\b
Without --wire a text goes over lmi, tensors over v2 in binary, files over bidi:
  lmi        /predictions/MODEL               text
  openai     /v1/chat/completions             text
  v2         /v2/models/MODEL/infer           tensors; --stream: infer_stream
  generate   /v2/models/MODEL/generate        text or tensors; --stream: generate_stream
  grpc       gRPC's ModelInfer, over HTTP/2   tensors; --stream: ModelStreamInfer
  invoke     SageMaker's InvokeEndpoint       anything
  stream     its response stream              anything
  bidi       its bidirectional stream         text or a file, in parts
  websocket  a container's WebSocket          text or a file, in frames
  container  /models/MODEL/invoke             anything

\b
Exit status: 0 complete; 1 refused, or the model failed; 2 wrong command line;
3 cut off or not over in time; 4 cannot connect; 130 left by Ctrl-C.
""",
)
@click.argument("model", required=False)
@click.argument("inputs", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--url",
    metavar="URL",
    help="The server, http://HOST:PORT or unix:/PATH.  [default: where this configuration would listen]",
)
@click.option("--wire", type=click.Choice(_WIRES), metavar="WIRE", help="One of those below.  [default: by what is sent]")
@click.option("--http2", is_flag=True, help="HTTP/2: by prior knowledge in clear, by ALPN over TLS.")
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="Send it, as TEXT itself; - is stdin.")
@click.option("--file", metavar="PATH", help="Send its bytes; - is stdin, as it comes.")
@click.option("--wav", type=click.Path(path_type=Path), metavar="PATH", help="Send its samples: 16 kHz, mono, 16 bits.")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME=FILE.npy", help="Send an array; may be repeated.")
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="A parameter, in JSON or a text; may be repeated."
)
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="A field of the request; may be repeated.")
@click.option("--stream/--no-stream", default=None, help="As it is made, or all at once.  [default: text streams]")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Keep the answer: .npy for tensors, .wav for samples, .txt for texts, another name for the kind of the first "
    "part. Parts of the other kind are printed.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: head, token, part or tensor, end.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="For the whole call.  [default: none]"
)
@click.option(
    "--quiet",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="For a WebSocket whose server, unlike everywire's, names no end of input: it is left after this silence behind the "
    "last of the input.  [default: until the server closes it]",
)
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Trust this CA alone.  [default: the system's, and that of --tls-dev on this machine]",
)
@click.option(
    "--cert", type=click.Path(path_type=Path), metavar="FILE", help="Show this certificate, where it is asked for."
)
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Its private key.  [default: in --cert]")
@click.pass_obj
def call(
    given: CommandLine,
    /,
    model: str | None,
    inputs: tuple[str, ...],
    url: str | None,
    texts: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    **options: Any,
) -> NoReturn:
    """Call MODEL of a running server over any of its wires, and print the answer as it arrives.

    Several texts are several messages of one session, over bidi and websocket.
    """
    check_directory()
    if model is None:
        from gateway.cli.call.which import which_model

        raise click.UsageError(which_model(url or _own_url(given)))
    from gateway.cli.call.plan import CallOptions, plan
    from gateway.cli.call.report import Report
    from gateway.cli.call.run import run as make

    asked = CallOptions(model=model, url=url or _own_url(given), texts=(*inputs, *texts), **options)
    chosen = plan(asked, sys.stdin.buffer if sys.stdin is not None else io.BytesIO())
    report = Report(
        lambda text: click.echo(text, nl=False),
        lambda line: click.echo(f"Error: {line}", err=True),
        as_json=as_json,
        out=out,
    )
    click.get_current_context().exit(make(chosen, report))


def _own_url(given: CommandLine) -> str:
    """The URL at which a server with this configuration listens."""
    listen = given.resolve().config.listen
    if url := reached_at(listen.host, listen.port):
        return url
    setting = "listen.port names no port" if listen.port <= 0 else "listen.host names no address"
    raise click.UsageError(f"--url is missing: {setting} to call")


@program.group(
    invoke_without_command=True,
    short_help="List the models there are; manage those of a server.",
    epilog=f"""
\b
Examples:
  everywire --config everywire.toml models    what this configuration would serve
  everywire models list                       what a running server serves, and how each fares
  everywire models reload chat                new weights, while it answers
  everywire models restart chat --instance 1  a new process in the place of one
  everywire models live --follow              streams as they open and close
  everywire models drain --timeout 5          drain the server, and report
{EXIT_STATUS}""",
)
@click.pass_context
def models(context: click.Context) -> None:
    """Without a command, list what this configuration would serve, with the messages that each model speaks and the tensors
    that it declares: the configured models, and those of the library where none is configured. No server is asked.

    The commands ask a running server by its operator plane: `operator.port` has to be set there, and here, or --url given.
    """
    check_directory()
    if context.invoked_subcommand is None:
        _list_configured(context.obj)


for _managing in COMMANDS:
    models.add_command(_managing)


def _list_configured(given: CommandLine) -> None:
    from gateway.catalog.factories import library_specs, load_spec
    from gateway.catalog.folder import make_spec
    from gateway.catalog.served_folder import read_served_folder, served_folder

    config = given.resolve().config
    rows = [("NAME", "FAMILY", "CAPACITY", "FROM", "TENSORS")]
    broken: list[str] = []

    def add(name: str, source: str, make: Callable[[], ModelSpec]) -> None:
        try:
            spec = make()
        except Exception as error:  # the import runs the user's own code, which may raise anything
            broken.append(reason_of(name, error))
            rows.append((name, "-", "-", source, ""))
        else:
            rows.append(_row(name, source, spec))

    for name, model in config.models.items():
        add(name, model.factory, partial(load_spec, name, model))
    path = served_folder(config, alone=True)
    if path:
        name = config.repository.model_name
        add(name, path, lambda: make_spec(read_served_folder(config, path), name, "everywire_model"))
    elif not config.models and not config.sagemaker.multi_model:
        rows += [_row(spec.name, "the library", spec) for spec in library_specs()]
    click.echo("Configured here (no server was asked; everywire models list asks one):", err=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if config.sagemaker.multi_model or config.v2.model_control:
        click.echo("Clients may load others.", err=True)
    if broken:
        raise ConfigError("; ".join(broken))


def _row(name: str, source: str, spec: ModelSpec) -> tuple[str, str, str, str, str]:
    return name, spec.family.value, str(spec.capacity), source, _tensors(spec)


def _tensors(spec: ModelSpec) -> str:
    """The tensors that a tensor model declares, in one line; empty for any other model."""
    if spec.family.value != "tensor":
        return ""
    batching = f"max_batch_size {spec.max_batch_size}{', batched' if spec.batching else ''}" if spec.max_batch_size else ""
    how = [batching, "decoupled" if spec.decoupled else "", "pieces" if spec.pieces else ""]
    taken, given = (_listed(tensors, spec.max_batch_size) for tensors in (spec.inputs, spec.outputs))
    return f"{taken} -> {given}" + (f" ({', '.join(filter(None, how))})" if any(how) else "")


def _listed(tensors: tuple[TensorSpec, ...] | None, batch: int) -> str:
    """The tensors, each as `name datatype [shape]`, with `?` behind the name of an optional one."""
    if tensors is None:
        return "any"
    said = []
    for tensor in tensors:
        shape = "[...]" if tensor.shape is None else str([-1, *tensor.shape] if batch else list(tensor.shape))
        said.append(f"{tensor.name}{'?' if tensor.optional else ''} {tensor.datatype or 'any'} {shape}")
    return ", ".join(said) or "none"


@program.group(
    invoke_without_command=True,
    short_help="Stand in for a cloud's front, before a container of yours.",
    epilog="""
\b
Examples:
  everywire emulate sagemaker --container ws://127.0.0.1:8080
""",
)
@click.pass_context
def emulate(context: click.Context) -> None:
    """Put the front that clients know before a container of yours, on this machine."""
    if context.invoked_subcommand is None:
        raise click.UsageError("emulate takes the name of a front, such as sagemaker: see `everywire emulate --help`")


@emulate.command(
    "sagemaker",
    short_help="SageMaker's runtime before a container.",
    epilog="""
\b
Examples:
  everywire emulate sagemaker --container ws://127.0.0.1:8080
  everywire --port 9000 emulate sagemaker --container http://127.0.0.1:8081 --path bidi
  everywire emulate sagemaker --container ws://127.0.0.1:8080 --limit ping_interval=5s
  everywire --port 0 emulate sagemaker --container ws://127.0.0.1:8080 --json

\b
Exit status: as that of `everywire serve`.
""",
)
@click.option("--container", required=True, metavar="URL", help="The container: ws://HOST:PORT (or http, wss, https).")
@click.option("--endpoint", default="container", show_default=True, metavar="NAME", help="The endpoint that it answers as.")
@click.option(
    "--path", default="", metavar="PATH", help="Its WebSocket's path where a request names none.  [default: the contract's]"
)
@click.option(
    "--models",
    default="",
    metavar="PATH",
    help="It is a multi-model container, and its models are below this path of its own: X-Amzn-SageMaker-Target-Model "
    "names one, which it is asked to load on first use, and to unload when it has no memory for another.",
)
@click.option("--ca", default="", metavar="FILE", help="CA of a wss:// container.  [default: the system's]")
@click.option(
    "--half-close-quiet",
    metavar="SECONDS",
    help="For a container that neither names its end of input nor closes its sessions: once the client has ended its input, "
    "Close is sent after this silence. Longer than any answer takes: most WebSocket libraries drop what comes after a "
    "Close.  [default: none is sent; a session lasts until the container closes it, or its time is over]",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another limit of the bridge; may be repeated. A wrong NAME tells all there are.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Once it listens, one JSON object: where, and what clients must trust."
)
@click.pass_context
def emulate_sagemaker(
    context: click.Context,
    container: str,
    endpoint: str,
    path: str,
    models: str,
    ca: str,
    half_close_quiet: str | None,
    limits: tuple[str, ...],
    as_json: bool,
) -> NoReturn:
    """Answer SageMaker's clients from a model container: bidirectional streams over its WebSocket, InvokeEndpoint and
    response streams over its /invocations, its health by its /ping.

    TLS has a certificate made for localhost, as the AWS SDK speaks HTTP/2 over TLS alone.
    """
    check_directory()
    given: CommandLine = context.obj
    resolved = given.resolve()
    pairs: dict[str, Any] = {**_limit_pairs(limits)}
    if half_close_quiet is not None:
        try:
            pairs["half_close_quiet"] = parse_duration(half_close_quiet)
        except ValueError:
            text = half_close_quiet[:100]
            raise click.UsageError(f"--half-close-quiet must be a duration such as 1s, not {text!r}") from None
    from gateway.cli.serve import run
    from gateway.containers.connection import container_limits
    from gateway.containers.emulate import Emulation
    from gateway.net.tls_context import development_certificate

    try:
        allowed = container_limits(pairs)
    except ConfigError as e:
        raise ConfigError(f"--limit: {e}") from None
    emulation = Emulation(resolved, container, endpoint, path=path, ca=ca, models=models, limits=allowed)
    chosen = emulation.config
    certificate = str(development_certificate(chosen.tls).ca.absolute()) if chosen.tls.dev else ""
    tell = emulation.told if as_json else emulation.advice
    code = run(chosen, emulation.models, listening=lambda ports: click.echo(tell(ports, certificate)))
    context.exit(code)


def _limit_pairs(limits: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in limits:
        name, found, value = (part.strip() for part in text.partition("="))
        if not found:
            raise click.UsageError(f"--limit takes NAME=VALUE, such as connect_timeout=250ms, not {text[:100]!r}")
        if name in pairs:
            raise click.UsageError(f"--limit: {name} is set twice")
        if name == "half_close_quiet":
            raise click.UsageError("--limit: half_close_quiet has a flag of its own, --half-close-quiet")
        pairs[name] = value
    return pairs


def _serve(context: click.Context, given: CommandLine) -> NoReturn:
    check_directory()
    given = given.named()
    chosen = given.resolve().config
    if chosen.tls.dev:
        logging_setup.configure(chosen.log)
        _announce_certificate(chosen.tls)
    if (processes := processes_of(chosen)) > 1:
        from gateway.cli.fronts import run_fronts

        context.exit(run_fronts(chosen, given, processes))
    from gateway.cli.serve import run
    from gateway.cli.start.block import start_block

    context.exit(run(replace(chosen, listen=replace(chosen.listen, processes=1)), greeting=start_block))


def _announce_certificate(tls: TLSConfig) -> None:
    """Logs the place of the development certificate's CA."""
    from gateway.net.tls_context import development_certificate

    made = development_certificate(tls)
    extra = {"SSL_CERT_FILE": str(made.ca.absolute()), "expires": made.expires.isoformat()}
    _log.info("TLS has a development certificate: clients trust it by SSL_CERT_FILE", extra=extra)


def main() -> None:
    """Runs the command line and ends the process."""
    program()
