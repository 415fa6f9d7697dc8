"""Asks the operator plane of a running server, for the command line: plain blocking calls of the standard library."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

from gateway.addresses import UNIX
from protocols.sse import ServerSentEvent, SSEDecoder

T = TypeVar("T")

_CONNECT = 10.0


class Unreachable(Exception):
    """Nobody answers there, or not as an operator plane does. The text is for the operator."""


class PlaneRefused(Exception):
    """The plane said no, or could not. The text is its own."""


@final
class _OverUnix(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT)
        self._at = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._at)


@final
class PlaneClient:
    """The plane at a URL, which `token` opens where it demands one. No proxy is asked."""

    def __init__(self, url: str, token: str = "") -> None:
        """`unix:PATH` is a Unix socket. ValueError for what is no URL of a server."""
        self._unix = url.removeprefix(UNIX) if url.startswith(UNIX) else ""
        if self._unix:
            url = "http://localhost"
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.query:
            raise ValueError(f"{url[:100]!r} is not such as http://127.0.0.1:9000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path, self._url = parts.path.rstrip("/"), f"{UNIX}{self._unix}" if self._unix else url
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer, however long it takes. Refused for one that is an error, Unreachable where none comes."""
        with closing(self._connect()) as connection:
            status, answer = self._said(lambda: self._asked(connection, method, path, body))
            return self._checked(status, answer)

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """The name and JSON of each event as it comes, until the plane ends them. As `ask`."""
        with closing(self._connect()) as connection:
            response = self._said(lambda: self._begun(connection, "GET", path, None))
            if response.status != 200:
                self._checked(response.status, self._said(response.read))
            decoder = SSEDecoder()
            while piece := self._said(lambda: response.read1(65536)):
                decoder.receive_data(piece)
                while isinstance(event := decoder.next_event(), ServerSentEvent):
                    yield event.event, json.loads(event.data)

    def _connect(self) -> HTTPConnection:
        if self._unix:
            connection: HTTPConnection = _OverUnix(self._unix)
        else:
            kind = HTTPSConnection if self._secure else HTTPConnection
            connection = kind(self._host, self._port, timeout=_CONNECT)
        self._said(connection.connect)
        assert isinstance(connection.sock, socket.socket)
        connection.sock.settimeout(None)
        return connection

    def _begun(self, connection: HTTPConnection, method: str, path: str, body: Any) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, data, {**self._headers, "content-type": "application/json"})
        return connection.getresponse()

    def _asked(self, connection: HTTPConnection, method: str, path: str, body: Any) -> tuple[int, bytes]:
        response = self._begun(connection, method, path, body)
        return response.status, response.read()

    def _said(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (OSError, HTTPException) as e:
            raise Unreachable(f"{self._url}: {(isinstance(e, OSError) and e.strerror) or e or type(e).__name__}") from None

    def _checked(self, status: int, answer: bytes) -> Any:
        try:
            said = json.loads(answer)
        except ValueError:
            raise Unreachable(f"{self._url} is no operator plane: it answered {status}") from None
        if status < 400:
            return said
        if not (isinstance(said, dict) and isinstance(said.get("error"), str)):
            raise Unreachable(f"{self._url} is no operator plane: it answered {status}")
        raise PlaneRefused(said["error"])
