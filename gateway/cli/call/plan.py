"""Plans a call from the options of its command line, before anything is connected."""

from __future__ import annotations

import enum
import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, final
from urllib.parse import SplitResult, quote, urlsplit

import click
import ml_dtypes
import numpy as np
import numpy.typing as npt
import trio

from gateway.addresses import UNIX
from gateway.cli.call.wav import open_samples
from gateway.client import questions
from gateway.client.answers import EventsAnswer, PiecesAnswer
from gateway.client.questions import Question
from gateway.config.problem import ConfigError
from gateway.net import development_certificate
from models.blocking import in_thread
from models.messages import datatype_of
from protocols import v2
from protocols.aws import invoke
from protocols.events import Headers

PIECE = 65_536
"""Bytes of a file that are sent as one part, at most."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


class CallWire(enum.Enum):
    """The wires by which a server is called."""

    LMI = "lmi"
    OPENAI = "openai"
    V2 = "v2"
    GENERATE = "generate"
    GRPC = "grpc"
    INVOKE = "invoke"
    STREAM = "stream"
    BIDI = "bidi"
    WEBSOCKET = "websocket"
    CONTAINER = "container"


class Kind(enum.Enum):
    """The kinds of input for the model."""

    TEXT = "text"
    FILE = "--file"
    WAV = "--wav"
    TENSOR = "--tensor"


_TAKES: Mapping[CallWire, tuple[Kind, ...]] = {
    CallWire.LMI: (Kind.TEXT,),
    CallWire.OPENAI: (Kind.TEXT,),
    CallWire.V2: (Kind.TENSOR,),
    CallWire.GRPC: (Kind.TENSOR,),
    CallWire.GENERATE: (Kind.TEXT, Kind.TENSOR),
    CallWire.INVOKE: tuple(Kind),
    CallWire.STREAM: tuple(Kind),
    CallWire.CONTAINER: tuple(Kind),
    CallWire.BIDI: (Kind.TEXT, Kind.FILE, Kind.WAV),
    CallWire.WEBSOCKET: (Kind.TEXT, Kind.FILE, Kind.WAV),
}
_DEFAULT = {Kind.TEXT: CallWire.LMI, Kind.TENSOR: CallWire.V2, Kind.FILE: CallWire.BIDI, Kind.WAV: CallWire.BIDI}
_PARTED = (CallWire.BIDI, CallWire.WEBSOCKET)
_CHOOSING = (
    CallWire.LMI, CallWire.OPENAI, CallWire.V2, CallWire.GENERATE, CallWire.GRPC, CallWire.INVOKE, CallWire.CONTAINER,
)  # fmt: skip
"""The wires that can answer as a whole or as a stream."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallTarget:
    """The server to call. `tls` is None for clear text."""

    host: str
    port: int
    authority: bytes
    prefix: str
    """The path before every route."""
    tls: ssl.SSLContext | None
    http2: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The data of one part. `last` False: the next piece continues it."""

    data: bytes
    last: bool = True
    text: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, ready to be made. `question` is the request; over WebSocket only its path and headers count. A question
    without a body, and a WebSocket, send `pieces`."""

    server: CallTarget
    wire: CallWire
    question: Question
    instead: Question | None
    """Sent if the server answers `question` with UNIMPLEMENTED: gRPC has another method for decoupled models."""
    pieces: Callable[[], AsyncGenerator[Piece, None]]
    kind: Kind
    texts: int
    """The number of text messages to send."""
    timeout: float
    """Seconds for the whole call; infinite for no limit."""
    quiet: float
    """Seconds of silence after which the client closes a WebSocket whose server names no end of input; infinite: it waits
    until the server closes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of the command line, as they were given."""

    model: str
    url: str
    texts: Sequence[str] = ()
    file: str | None = None
    wav: Path | None = None
    tensors: Sequence[str] = ()
    wire: str | None = None
    http2: bool = False
    params: Sequence[str] = ()
    headers: Sequence[str] = ()
    stream: bool | None = None
    timeout: float | None = None
    quiet: float | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def plan(given: CallOptions, stdin: BinaryIO) -> Call:
    """Plans the call; connects to nothing. UsageError, which names what is allowed, for options that are invalid or do not
    fit together; ConfigError for an invalid CA."""
    kind = _kind_of(given)
    wire = CallWire(given.wire) if given.wire else _DEFAULT[kind]
    if kind not in _TAKES[wire]:
        allowed = " or ".join(k.value for k in _TAKES[wire])
        others = ", ".join(w.value for w in _TAKES if kind in _TAKES[w])
        raise click.UsageError(f"--wire {wire.value} takes {allowed}, not {kind.value}: for that there are {others}")
    if given.stream is not None and wire not in _CHOOSING:
        raise click.UsageError(f"--wire {wire.value} always streams: it takes neither --stream nor --no-stream")
    if wire is CallWire.WEBSOCKET and given.http2:
        raise click.UsageError("--wire websocket is over HTTP/1.1: it takes no --http2")
    if wire is CallWire.INVOKE and given.stream:
        wire = CallWire.STREAM
    params = dict(_pair("--param", text, "=", "max_new_tokens=20", read=True) for text in given.params)
    if "stream" in params:
        raise click.UsageError("--param stream: --stream or --no-stream says that")
    extra = tuple(_header(text) for text in given.headers)
    texts = tuple(_read_text(stdin) if text == "-" else text for text in given.texts)
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):  # Python's stand-ins for bytes
        raise click.UsageError("the text is not UTF-8: send bytes with --file")
    if len(texts) > 1 and wire not in _PARTED:
        raise click.UsageError(f"--wire {wire.value} takes one text, got {len(texts)}: quote it")
    question = _question(given, wire, kind, texts, params, stdin)
    question = replace(question, headers=_overridden(question.headers, extra))
    return Call(
        server=_server(given, http2=given.http2 or question.http2),
        wire=wire,
        question=question,
        instead=_streamed(question) if wire is CallWire.GRPC and given.stream is None else None,
        pieces=_pieces(given, kind, texts, params, stdin) if wire in _PARTED else _none,
        kind=kind,
        texts=len(texts),
        timeout=given.timeout if given.timeout is not None else float("inf"),
        quiet=given.quiet if given.quiet is not None else float("inf"),
    )


def _kind_of(given: CallOptions) -> Kind:
    there = {
        Kind.TEXT: bool(given.texts),
        Kind.FILE: given.file is not None,
        Kind.WAV: given.wav is not None,
        Kind.TENSOR: bool(given.tensors),
    }
    kinds = [kind for kind, is_there in there.items() if is_there]
    if not kinds:
        raise click.UsageError("nothing to send: give a text, - for one from stdin, --file, --wav or --tensor")
    if len(kinds) > 1:
        raise click.UsageError(f"{kinds[0].value} and {kinds[1].value} cannot be sent in one call")
    return kinds[0]


# ---- the request ----


def _question(
    given: CallOptions, wire: CallWire, kind: Kind, texts: Sequence[str], params: dict[str, Any], stdin: BinaryIO
) -> Question:
    model = quote(given.model, safe="")
    text = texts[0] if texts else ""
    stream = given.stream if given.stream is not None else kind is Kind.TEXT
    match wire:
        case CallWire.LMI:
            return questions.lmi(text, model, stream=stream, **params)
        case CallWire.OPENAI:
            if taken := sorted({"model", "messages"} & set(params)):
                raise click.UsageError(f"--param {taken[0]}: the command line itself says that")
            return questions.openai(text, given.model, stream=stream, **params)
        case CallWire.V2:
            return questions.infer(_tensors(given), model, stream=stream, parameters=params)
        case CallWire.GRPC:
            try:
                return questions.grpc_infer(
                    _tensors(given), given.model, stream=stream, parameters=params, timeout=given.timeout
                )
            except v2.V2Error as e:
                raise click.UsageError(f"--wire grpc: {e.message}") from None
        case CallWire.GENERATE:
            members = {"text_input": text} if kind is Kind.TEXT else {n: _listed(a) for n, a in _tensors(given).items()}
            return questions.generate(members, model, stream=stream, **params)
        case CallWire.BIDI:
            return questions.bidirectional(model)
        case CallWire.WEBSOCKET:
            path = f"/models/{model}/invocations-bidirectional-stream"
            return Question(path=path, headers=(), body=None, answer=PiecesAnswer)
        case CallWire.INVOKE | CallWire.STREAM | CallWire.CONTAINER:
            streams = wire is CallWire.STREAM or bool(given.stream)
            body, content_type = _body(given, kind, text, params, stdin, stream=streams)
            if wire is not CallWire.CONTAINER:
                asked = questions.invoke(model, body, content_type, stream=wire is CallWire.STREAM)
                answer = EventsAnswer if wire is CallWire.STREAM else PiecesAnswer
                return Question(path=asked.path, headers=asked.headers, body=body, answer=answer)
            fields = ((b"content-type", content_type.encode()),)
            return Question(path=f"/models/{model}/invoke", headers=fields, body=body, answer=PiecesAnswer)


def _streamed(question: Question) -> Question:
    """A request of gRPC's ModelInfer as one of ModelStreamInfer."""
    method = questions.grpc_infer({}, "", stream=True)
    return replace(question, path=method.path, answer=method.answer)


def _body(
    given: CallOptions, kind: Kind, text: str, params: dict[str, Any], stdin: BinaryIO, *, stream: bool
) -> tuple[bytes, str]:
    """The body and its content type, for the routes that take any body."""
    if kind is Kind.TEXT:
        return questions.lmi(text, stream=stream, **params).body or b"", "application/json"
    if kind is Kind.TENSOR:
        asked = questions.infer(_tensors(given), "", parameters=params)
        length = next(int(value) for name, value in asked.headers if name == v2.IHCL)
        return asked.body or b"", invoke.binary_json_content_type(length)
    _no_params(params, kind)
    if kind is Kind.WAV:
        assert given.wav is not None
        with open_samples(given.wav) as samples:
            return samples.read(-1), "audio/l16"
    assert given.file is not None
    return stdin.read() if given.file == "-" else _read(given.file), "application/octet-stream"


def _no_params(params: Mapping[str, Any], kind: Kind) -> None:
    if params:
        raise click.UsageError(f"--param has no place in the bytes of {kind.value}: it goes with a text or with --tensor")


def _pieces(
    given: CallOptions, kind: Kind, texts: Sequence[str], params: dict[str, Any], stdin: BinaryIO
) -> Callable[[], AsyncGenerator[Piece, None]]:
    if kind is Kind.TEXT:
        said = [json.dumps({"inputs": text, "parameters": params}) for text in texts] if params else texts
        return partial(_text_pieces, said)
    _no_params(params, kind)
    if kind is Kind.WAV:
        assert given.wav is not None
        open_samples(given.wav).close()
        return partial(_wav_pieces, given.wav)
    assert given.file is not None
    if given.file == "-":
        return partial(_stdin_pieces, stdin)
    try:
        Path(given.file).open("rb").close()
    except OSError as e:
        raise click.UsageError(f"{given.file} cannot be read: {e.strerror}") from None
    return partial(_file_pieces, given.file)


async def _none() -> AsyncGenerator[Piece, None]:
    return
    yield  # makes this a generator


async def _text_pieces(texts: Sequence[str]) -> AsyncGenerator[Piece, None]:
    for text in texts:
        yield Piece(data=text.encode(), text=True)


async def _wav_pieces(path: Path) -> AsyncGenerator[Piece, None]:
    with open_samples(path) as samples:
        while data := samples.read():
            yield Piece(data=data)


async def _file_pieces(path: str) -> AsyncGenerator[Piece, None]:
    async with await trio.open_file(path, "rb") as file:
        data = await file.read(PIECE)
        while True:
            following = await file.read(PIECE)
            yield Piece(data=data, last=not following)
            if not following:
                return
            data = following


async def _stdin_pieces(stdin: BinaryIO) -> AsyncGenerator[Piece, None]:
    """Yields the bytes of stdin as they come, each read as a part. Reads below the buffer, as an abandoned thread would keep
    the buffer locked."""
    try:
        read = partial(os.read, stdin.fileno(), PIECE)
    except OSError:  # not a real file, as in a test
        read = partial(stdin.read, PIECE)
    while data := await in_thread(read, abandon_on_cancel=True):
        yield Piece(data=data)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise click.UsageError(f"{path} cannot be read: {e.strerror}") from None


def _read_text(stdin: BinaryIO) -> str:
    try:
        return stdin.read().decode()
    except UnicodeDecodeError as e:
        raise click.UsageError(f"stdin is not UTF-8 at byte {e.start}: send bytes with --file -") from None


def _tensors(given: CallOptions) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for text in given.tensors:
        name, path = _pair("--tensor", text, "=", "INPUT0=input0.npy")
        if name in arrays:
            raise click.UsageError(f"--tensor {name} is given twice")
        arrays[name] = _array(name, path)
    return arrays


def _array(name: str, path: str) -> npt.NDArray[Any]:
    try:
        array: Any = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise click.UsageError(f"--tensor {name}: {path} is no .npy file of one array")
        if array.dtype == np.dtype("V2"):  # numpy reads back bfloat16 as V2
            array = array.view(ml_dtypes.bfloat16)
        if array.dtype.kind == "U":
            array = np.char.encode(array, "utf-8")
        datatype_of(array.dtype)
    except OSError as e:
        raise click.UsageError(f"--tensor {name}: {path} cannot be read: {e.strerror or e}") from None
    except (ValueError, EOFError, TypeError) as e:
        raise click.UsageError(f"--tensor {name}: {path}: {str(e)[:200]}") from None
    chosen: npt.NDArray[Any] = array.astype(object) if array.dtype.kind == "S" else array
    return chosen


def _listed(array: npt.NDArray[Any]) -> Any:
    if array.dtype.kind == "O":
        return [item.decode() for item in array.ravel()]
    return array.tolist() if array.ndim else [array.item()]


# ---- pairs ----


def _pair(option: str, text: str, between: str, example: str, *, read: bool = False) -> tuple[str, Any]:
    name, found, value = text.partition(between)
    if not (name and found):
        raise click.UsageError(f"{option} takes NAME{between}VALUE, such as {example}, not {text[:100]!r}")
    return name, _value(value) if read else value


def _value(text: str) -> Any:
    """The value of a text that is JSON; otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _header(text: str) -> tuple[bytes, bytes]:
    name, value = _pair("--header", text, ":", "x-tenant:blue")
    name, value = name.strip().lower(), value.strip()
    if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()) or not value.isprintable():
        raise click.UsageError(f"--header: {text[:100]!r} is no field of a header")
    if name in ("host", "content-length", "transfer-encoding", "connection"):
        raise click.UsageError(f"--header {name}: the connection itself says that")
    return name.encode(), value.encode()


def _overridden(headers: Headers, extra: Headers) -> Headers:
    names = {name for name, _ in extra}
    return (*(field for field in headers if field[0] not in names), *extra)


# ---- the server ----


def _server(given: CallOptions, *, http2: bool) -> CallTarget:
    at = given.url if given.url.startswith(UNIX) else ""
    try:
        url = urlsplit("http://localhost" if at else given.url)
        host, port = url.hostname, url.port
    except ValueError as e:
        raise click.UsageError(f"--url {given.url[:100]!r}: {e}") from None
    if url.scheme not in ("http", "https") or not host or url.query or url.fragment or url.username:
        raise click.UsageError(f"--url takes http://HOST:PORT, https://HOST:PORT or unix:/PATH, not {given.url[:100]!r}")
    for name, file in (("--ca", given.ca), ("--cert", given.cert), ("--key", given.key)):
        if url.scheme == "http" and file is not None:
            raise click.UsageError(f"{name} is for an https:// URL")
    tls = _context(given.ca, host, "h2" if http2 else "http/1.1") if url.scheme == "https" else None
    if tls is not None:
        _show_certificate(tls, given.cert, given.key)
    return CallTarget(
        host=at or host,
        port=port if port is not None else 443 if tls else 80,
        authority=_authority(url),
        prefix=url.path.rstrip("/"),
        tls=tls,
        http2=http2,
    )


def _authority(url: SplitResult) -> bytes:
    return url.netloc.encode("idna" if not url.netloc.isascii() else "ascii")


def _context(ca: Path | None, host: str, alpn: str) -> ssl.SSLContext:
    """A context that trusts only `ca` if it is given; otherwise the system's CAs and, for this machine, also the development
    certificate's."""
    from gateway.net.tls_context import client_context

    if ca is not None:
        return client_context(ca, alpn=[alpn])
    context = ssl.create_default_context()
    context.set_alpn_protocols([alpn])
    if host in _LOCAL:
        try:
            known = development_certificate.default_directory(os.environ) / "ca.pem"
            if known.is_file():
                context.load_verify_locations(known)
        except (ConfigError, OSError):
            pass  # a CA that cannot be read is not trusted: the handshake then fails
    return context


def _show_certificate(context: ssl.SSLContext, cert: Path | None, key: Path | None) -> None:
    """Loads the certificate for a server that asks for the client's."""

    def refuse() -> str:
        raise click.UsageError(f"{key or cert} is encrypted: give a key without a passphrase")

    if cert is None:
        if key is not None:
            raise click.UsageError("--key is that of --cert, which is missing")
        return
    try:
        context.load_cert_chain(cert, key, password=refuse)
    except ssl.SSLError as e:
        files = f"--cert {cert}" + (f" and --key {key}" if key is not None else "")
        raise click.UsageError(f"{files}: no certificate with its key, in PEM: {e.reason or e}") from None
    except OSError as e:
        missing = next((file for file in (cert, key) if file is not None and not os.access(file, os.R_OK)), cert)
        raise click.UsageError(f"{missing} cannot be read: {e.strerror}") from None
