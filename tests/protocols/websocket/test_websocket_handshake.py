"""The opening handshake, alone and against wsproto's in both roles."""

from __future__ import annotations

import base64

import pytest
from wsproto.connection import ConnectionType
from wsproto.events import AcceptConnection
from wsproto.events import Request as WsprotoRequest
from wsproto.handshake import H11Handshake

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Head, Headers, Response
from protocols.websocket.handshake import accept_headers, check_response, refusal_headers, request_headers

NONCE = b"the sample nonce"  # RFC 6455 section 1.3
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
TOKEN = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def handshake(
    *extra: tuple[bytes, bytes],
    key: bytes = KEY,
    version: bytes = b"13",
    method: bytes = b"GET",
    upgrade: bytes = b"websocket",
) -> Head:
    headers = [(b"sec-websocket-key", key), (b"sec-websocket-version", version), *extra]
    return Head(method=method, target=b"/chat", headers=headers, upgrade=upgrade)


def answer(*extra: tuple[bytes, bytes], status: int = 101, token: bytes = TOKEN) -> Response:
    return Response(stream=1, status=status, headers=[(b"sec-websocket-accept", token), *extra])


def lines(headers: Headers) -> bytes:
    return b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n"


def test_the_rfc_example_is_accepted_with_its_token() -> None:
    assert accept_headers(handshake()) == [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-accept", TOKEN),
    ]


def test_the_subprotocol_is_our_favourite_among_those_offered() -> None:
    offered = [(b"sec-websocket-protocol", b"chat, superchat"), (b"sec-websocket-protocol", b"\tparts ")]
    request = handshake(*offered)
    assert accept_headers(request, subprotocols=[b"v9", b"parts", b"chat"])[-1] == (b"sec-websocket-protocol", b"parts")
    assert len(accept_headers(request, subprotocols=[b"v9"])) == 3


def test_an_extension_offered_is_not_taken_up() -> None:
    headers = accept_headers(handshake((b"sec-websocket-extensions", b"permessage-deflate")))
    assert b"sec-websocket-extensions" not in dict(headers)


@pytest.mark.parametrize("version", [b"8", b"12", b"", b"013", b"x" * 300])
def test_another_version_is_refused_with_426_and_told_ours(version: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        accept_headers(handshake(version=version))
    assert caught.value.status == 426
    assert refusal_headers(caught.value) == [(b"sec-websocket-version", b"13")]
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(handshake(key=b"short"), id="not base64 of 16 bytes"),
        pytest.param(handshake(key=base64.b64encode(bytes(15))), id="15 bytes"),
        pytest.param(handshake(key=base64.b64encode(bytes(17))), id="17 bytes, as long in base64"),
        pytest.param(handshake(key=b"dGhlIHNhbXBsZSBub25jZ!=="), id="a letter base64 does not have"),
        pytest.param(handshake(key=b"=" * 24), id="padding alone"),
        pytest.param(handshake(key=KEY + b"=="), id="padding to spare"),
        pytest.param(handshake((b"sec-websocket-key", KEY)), id="two keys"),
        pytest.param(handshake((b"sec-websocket-version", b"13")), id="two versions"),
        pytest.param(handshake(method=b"POST"), id="not GET"),
        pytest.param(handshake(upgrade=b"h2c"), id="another upgrade"),
        pytest.param(Head(method=b"GET", target=b"/", upgrade=b"websocket"), id="no headers"),
    ],
)
def test_a_bad_handshake_is_refused_with_400(request_: Head) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        accept_headers(request_)
    assert caught.value.status == 400
    assert refusal_headers(caught.value) == []


def test_a_client_and_a_server_of_ours_agree() -> None:
    headers = request_headers(NONCE, subprotocols=[b"a", b"b"])
    request = Head(method=b"GET", target=b"/", headers=headers, upgrade=b"websocket")
    response = Response(stream=1, status=101, headers=accept_headers(request, subprotocols=[b"b"]))
    assert check_response(NONCE, response, subprotocols=[b"a", b"b"]) == b"b"


def test_a_response_without_a_subprotocol_chooses_none() -> None:
    assert check_response(NONCE, answer(), subprotocols=[b"a"]) is None


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(answer(status=200), id="not switching"),
        pytest.param(answer(token=KEY), id="a token for nothing"),
        pytest.param(Response(stream=1, status=101), id="no token"),
        pytest.param(answer((b"sec-websocket-accept", TOKEN)), id="two tokens"),
        pytest.param(answer((b"sec-websocket-extensions", b"permessage-deflate")), id="an extension nobody offered"),
        pytest.param(answer((b"sec-websocket-protocol", b"c")), id="a subprotocol nobody offered"),
        pytest.param(answer(*[(b"sec-websocket-protocol", b"a")] * 2), id="two subprotocols"),
    ],
)
def test_a_client_refuses_a_response_that_does_not_accept_its_handshake(response: Response) -> None:
    with pytest.raises(RemoteProtocolError):
        check_response(NONCE, response, subprotocols=[b"a"])


def test_a_key_that_is_not_16_bytes_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="16 random bytes"):
        request_headers(KEY)


def test_wsproto_as_the_client_accepts_our_answer() -> None:
    client = H11Handshake(ConnectionType.CLIENT)
    head = client.send(WsprotoRequest(host="example.org", target="/", subprotocols=["parts"]))
    headers = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:-2]]
    lowered = [(name.lower(), value) for name, value in headers]
    request = Head(method=b"GET", target=b"/", headers=lowered, upgrade=b"websocket")
    client.receive_data(b"HTTP/1.1 101 \r\n" + lines(accept_headers(request, subprotocols=[b"parts"])))
    [event] = client.events()
    assert isinstance(event, AcceptConnection)
    assert event.subprotocol == "parts"


def test_wsproto_as_the_server_accepts_our_request() -> None:
    server = H11Handshake(ConnectionType.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nhost: example.org\r\n" + lines(request_headers(NONCE, subprotocols=[b"parts"])))
    [event] = server.events()
    assert isinstance(event, WsprotoRequest)
    head = server.send(AcceptConnection(subprotocol="parts"))
    headers = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:-2]]
    response = Response(stream=1, status=101, headers=[(name.lower(), value) for name, value in headers])
    assert check_response(NONCE, response, subprotocols=[b"parts"]) == b"parts"
