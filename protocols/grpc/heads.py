"""gRPC heads and trailers in both roles: requests, answers, and their status."""

from __future__ import annotations

from typing import final

import msgspec

from protocols.content_coding import Coding
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Head, Headers, Response
from protocols.grpc.compression import ACCEPTED, parse_accepted, parse_encoding
from protocols.grpc.metadata import (
    CONTENT_TYPE,
    Metadata,
    decode_metadata,
    encode_metadata,
    encode_timeout,
    is_grpc,
    parse_timeout,
)
from protocols.grpc.status import GRPCError, StatusCode, code_of_http_status, decode_text, encode_text, parse_code

_PLAIN: Headers = ((b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", ACCEPTED))
_OK: Headers = ((b"grpc-status", b"0"),)

# ---- the server's side


@final
class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a call, as a server reads it."""

    service: str
    """The full name with its package, such as `inference.GRPCInferenceService`."""
    method: str
    timeout: float | None = None
    """Seconds from the arrival of the head; 0 if the deadline has passed, None if there is none."""
    encoding: Coding | None = None
    """The encoding of the request's compressed messages; None if they must not be compressed."""
    accepts: frozenset[Coding] = frozenset()
    """The encodings that messages of the answer may have."""
    fields: Headers = ()

    @property
    def metadata(self) -> Metadata:
        """The custom metadata, decoded again at each access."""
        return decode_metadata(self.fields)


def read_call(head: Head) -> CallHead:
    """Reads the head of a call.

    RemoteProtocolError for a request that is not gRPC, with the HTTP status to answer with: 405 for a method other than
    POST, 415 for another or no content type (PROTOCOL-HTTP2). GRPCError for errors that a Trailers-Only answer reports:
    UNIMPLEMENTED for a path that is not `/service/method` and for an unknown `grpc-encoding`, INTERNAL for a malformed
    `grpc-timeout`. `te` is ignored, as by grpc-go. If a field is repeated the first one counts, except for
    `grpc-accept-encoding`, whose lines are one list.
    """
    fields = head.fields
    if head.method != b"POST":
        raise RemoteProtocolError(f"a gRPC request has the method POST, got {_shown(head.method)}", status=405)
    if not is_grpc(kind := fields.get(b"content-type", b"")):
        raise RemoteProtocolError(f"content-type: expected application/grpc, got {_shown(kind)}", status=415)
    service, method = read_path(head.target)
    timeout, encoding = fields.get(b"grpc-timeout"), fields.get(b"grpc-encoding")
    accepts: frozenset[Coding] = frozenset()
    if b"grpc-accept-encoding" in fields:
        accepts = parse_accepted(value for name, value in head.headers if name == b"grpc-accept-encoding")
    return CallHead(
        service=service,
        method=method,
        timeout=None if timeout is None else parse_timeout(timeout),
        encoding=None if encoding is None else parse_encoding(encoding),
        accepts=accepts,
        fields=head.headers,
    )


def read_path(target: bytes) -> tuple[str, str]:
    """Returns the service and the method of a `:path`, both as sent: nothing is percent-decoded, and a query is part of the
    method. GRPCError as from `unknown_method` if the path does not have two parts."""
    slash, _, rest = target.partition(b"/")
    service, _, method = rest.rpartition(b"/")
    if slash or not service or not method:
        raise unknown_method(target)
    return service.decode("latin-1"), method.decode("latin-1")


def unknown_method(target: bytes) -> GRPCError:
    """Returns the error for a `:path` that is not served: UNIMPLEMENTED, with a text that names it (statuscodes.md)."""
    return GRPCError(StatusCode.UNIMPLEMENTED, f"there is no method {_shown(target)}")


def answer_head(encoding: Coding | None = None, metadata: Metadata = ()) -> Headers:
    """Returns the fields of an answer's head with HTTP status 200; messages and `trailers` must follow. With an `encoding`,
    messages may be compressed. Without arguments it is the same object each time."""
    if encoding is None and not metadata:
        return _PLAIN
    named = () if encoding is None else ((b"grpc-encoding", encoding.value),)
    return (*_PLAIN, *named, *encode_metadata(metadata))


def trailers(code: StatusCode = StatusCode.OK, message: str = "", metadata: Metadata = ()) -> Headers:
    """Returns the trailers that end an answer after its head and messages: the status, also for OK. For a plain OK it is the
    same object each time. Messages are cut to the limit of `encode_text`."""
    if code is StatusCode.OK and not message and not metadata:
        return _OK
    status = (b"grpc-status", b"%d" % code)
    text = ((b"grpc-message", encode_text(message)),) if message else ()
    return (status, *text, *encode_metadata(metadata))


def trailers_only(code: StatusCode, message: str = "", metadata: Metadata = ()) -> Headers:
    """Returns the fields of an answer that is one head, with HTTP status 200 and END_STREAM: a call that fails before its
    first message. Clients retry only answers of this form (gRFC A6). It names our encodings, which tells a client why its
    own was refused (compression.md)."""
    return (*_PLAIN, *trailers(code, message, metadata))


# ---- the client's side


@final
class CallStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status with which a call has ended, as a client reads it, and the metadata of the trailers."""

    code: StatusCode
    message: str = ""
    metadata: Metadata = ()

    def check(self) -> None:
        """Raises GRPCError unless the status is OK."""
        if self.code is not StatusCode.OK:
            raise GRPCError(self.code, self.message)


@final
class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of an answer, as a client reads it. If it has a `status`, the call is over, and nothing after it counts."""

    encoding: Coding | None = None
    metadata: Metadata = ()
    status: CallStatus | None = None


def call_head(
    service: str,
    method: str,
    *,
    authority: bytes,
    scheme: bytes = b"http",
    timeout: float | None = None,
    encoding: Coding | None = None,
    user_agent: bytes = b"",
    metadata: Metadata = (),
) -> Head:
    """Returns the request that opens a call; messages follow as its body. `timeout` is in seconds. With an `encoding`,
    messages may be compressed. LocalProtocolError for a name that no path can hold, and for metadata as from
    `encode_metadata`."""
    target = f"/{service}/{method}"
    if not target.isascii() or not target.isprintable() or " " in target or "" in (service, method):
        raise LocalProtocolError(f"{target[:100]!r} cannot be the path of a gRPC method")
    fields = [] if timeout is None else [(b"grpc-timeout", encode_timeout(timeout))]
    fields += [(b"te", b"trailers"), (b"content-type", CONTENT_TYPE)]
    if encoding is not None:
        fields.append((b"grpc-encoding", encoding.value))
    fields.append((b"grpc-accept-encoding", ACCEPTED))
    if user_agent:
        fields.append((b"user-agent", user_agent))
    return Head(
        method=b"POST",
        target=target.encode(),
        authority=authority,
        scheme=scheme,
        headers=(*fields, *encode_metadata(metadata)),
    )


def read_answer(response: Response) -> AnswerHead:
    """Reads the head of an answer, which must not be an interim (1xx) one. It never raises: a head that ends the call has a
    status.

    The status is that of a `grpc-status` in the head (Trailers-Only), whatever the HTTP status. Otherwise an HTTP status
    other than 200 is mapped by `code_of_http_status`, another content type is UNKNOWN, and an unknown encoding is INTERNAL
    (compression.md).
    """
    fields = dict(reversed(response.headers))
    if b"grpc-status" in fields:
        return AnswerHead(status=read_trailers(response.headers))
    kind = fields.get(b"content-type", b"")
    if response.status != 200:
        return _over(code_of_http_status(response.status), f"the answer has the HTTP status {response.status}")
    if not is_grpc(kind):
        return _over(StatusCode.UNKNOWN, f"content-type: expected application/grpc, got {_shown(kind)}")
    try:
        encoding = parse_encoding(fields.get(b"grpc-encoding", b"identity"))
    except GRPCError as e:
        return _over(StatusCode.INTERNAL, e.message)
    return AnswerHead(encoding=encoding, metadata=decode_metadata(response.headers))


def read_trailers(fields: Headers) -> CallStatus:
    """Reads the status in trailers. It never raises: without a `grpc-status`, and so without trailers, it is UNKNOWN,
    because an answer without a status was cut off, whatever came before."""
    found = dict(reversed(fields))
    if b"grpc-status" not in found:
        return CallStatus(code=StatusCode.UNKNOWN, message="the answer ended without grpc-status")
    return CallStatus(
        code=parse_code(found[b"grpc-status"]),
        message=decode_text(found.get(b"grpc-message", b"")),
        metadata=decode_metadata(fields),
    )


def _over(code: StatusCode, message: str) -> AnswerHead:
    return AnswerHead(status=CallStatus(code=code, message=message))


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
