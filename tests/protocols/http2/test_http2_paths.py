"""The payload path and the library path: the same after each step of any sequence, and the right one of them is taken."""

from __future__ import annotations

import subprocess
import sys

import pytest
from h2.connection import H2Connection
from hypothesis import HealthCheck, settings

from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Request, Response
from protocols.http2 import payload
from protocols.http2.connection import HTTP2Connection
from protocols.http2.payload import PayloadPath
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import GET, POST, ByHand, Pair, data, frames, output
from tests.protocols.http2.http2_helpers import settings as settings_frame
from tests.protocols.http2.http2_paths import STRIDED, compare, sequences

test_both_paths_do_the_same_with_the_same_bytes = settings(
    max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)(sequences(compare))


def test_the_payload_path_is_taken_unless_it_is_declined() -> None:
    assert isinstance(HTTP2Connection(Role.SERVER)._h2, PayloadPath)
    assert not isinstance(HTTP2Connection(Role.SERVER, payload_path=False)._h2, PayloadPath)


def test_a_client_and_a_server_without_the_payload_path_understand_each_other() -> None:
    pair = Pair(payload_path=False)
    pair.request(1, bytes(100_000))
    pair.flow()
    while pair.server.unconsumed:
        pair.server.credit(1, pair.server.unconsumed)
        pair.flow()
    pair.server.respond(1, 200, ((b"x", b"y"),), (bytes(50_000),))
    pair.flow()
    assert pair.at_server[-1] == End(stream=1)
    assert pair.at_client[0] == Response(stream=1, status=200, headers=((b"x", b"y"),))
    assert sum(event.nbytes for event in pair.at_client if isinstance(event, Data)) == 50_000


def test_the_table_of_a_library_path_becomes_smaller_where_the_peer_says_so_and_never_larger_than_it_begins() -> None:
    client = ByHand(payload_path=False)
    for stream, sizes, left in ((1, (2**31, 65_536), 4096), (3, (100, 2**20, 2000), 100), (5, (0,), 0)):
        client.says(*(settings_frame({1: size}) for size in sizes), client.head(stream, GET, 1))
        output(client.server)
        client.server.send(Response(stream=stream, status=200, headers=((b"x", b"y"),)))
        (head,) = frames(output(client.server))
        client.decoder.max_allowed_table_size = sizes[-1]
        assert list(client.decoder.decode(head.payload, raw=True)) == [(b":status", b"200"), (b"x", b"y")]
        assert client.decoder.header_table_size == left


WITHOUT = """
import warnings
import h2.connection
import {module}
del {module}.{name}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from tests.protocols.http2.http2_helpers import POST, ByHand, data
(warning,) = [each for each in caught if each.category is RuntimeWarning]
assert "through h2's own objects" in str(warning.message) and "{name}" in str(warning.message), warning.message
client = ByHand()
print(client.says(client.head(1, POST), data(1, b"hello", 1)))
"""


@pytest.mark.programs
@pytest.mark.parametrize(("module", "name"), [("hpack.huffman_constants", "REQUEST_CODES"), ("h2.stream", "StreamClosedBy")])
def test_another_h2_is_used_through_its_own_objects_with_a_warning(module: str, name: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(module=module, name=name)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert "buffers=(b'hello',)" in said.stdout


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(H2Connection):
        def __getattribute__(self, name: str) -> object:
            if name == "_inbound_flow_control_window_manager":
                raise AttributeError(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(payload, "H2Connection", Other)
    with pytest.raises(ImportError, match=r"h2 4\.[0-9.]+ has no Other\._inbound_flow_control_window_manager"):
        payload._check_names()


# Answers that are sent in one call.


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("body", [(), (b"",), (b"a", b"bc"), (bytes(5000), bytearray(3)), (bytes(20_000),)])
def test_respond_is_head_data_and_end(payload_path: bool, flags: int, body: tuple[bytes, ...]) -> None:
    headers = ((b"x", b"y"), (b"content-length", b"3"))
    written = []
    for whole in (True, False):
        client = ByHand()
        client.server = HTTP2Connection(Role.SERVER, payload_path=payload_path)
        client.says(*ByHand.OPENING, client.head(1, POST, flags))
        if whole:
            client.server.respond(1, 200, headers, body)
        else:
            client.server.send(Response(stream=1, status=200, headers=headers))
            if body:
                client.server.send(Data(stream=1, buffers=body))
            client.server.send(End(stream=1))
        written.append((output(client.server), client.server.windows(), client.server.is_open(1)))
    assert written[0] == written[1]


def test_a_response_that_cannot_be_sent_queues_nothing() -> None:
    client = ByHand()
    client.says(client.head(1, GET, 1))
    output(client.server)
    for status, headers, body in (
        (100, (), (b"x",)),
        (101, (), (b"x",)),
        (200, ((b"X", b"y"),), (b"x",)),
        (200, (), (b"x", STRIDED)),
    ):
        with pytest.raises(LocalProtocolError):
            client.server.respond(1, status, headers, body)
        assert not client.server.has_output
        assert not client.server.queued(1)
    client.server.respond(1, 204, ())
    with pytest.raises(LocalProtocolError, match="not open"):
        client.server.respond(1, 200, ())
    with pytest.raises(LocalProtocolError, match="not open"):
        client.server.respond(3, 200, ())
    with pytest.raises(LocalProtocolError, match="not open"):
        client.server.send_data(1, (b"x",))


def test_a_client_does_not_respond() -> None:
    pair = Pair()
    pair.request(1)
    with pytest.raises(LocalProtocolError, match="client"):
        pair.client.respond(1, 200, ())


def test_send_data_is_what_send_does_with_data() -> None:
    client = ByHand()
    client.says(client.head(1))
    with pytest.raises(LocalProtocolError, match="no head"):
        client.server.send_data(1, (b"x",))
    client.server.send(Response(stream=1, status=200))
    client.server.send_data(1, (b"a", memoryview(b"b"), b""))
    with pytest.raises(LocalProtocolError, match="contiguous"):
        client.server.send_data(1, (b"c", STRIDED))
    assert client.server.queued(1) == 2
    assert output(client.server).endswith(data(1, b"ab"))
    client.server.close()
    with pytest.raises(LocalProtocolError, match="over"):
        client.server.send_data(1, (b"x",))


def test_a_request_in_pieces_costs_each_byte_once() -> None:
    client = ByHand()
    written = client.head(1) + data(1, bytes(16_384)) + data(1, b"x" * 1000, 1)
    events = client.says(*(written[at : at + 1] for at in range(len(written))))
    assert isinstance(events[0], Request)
    assert [event.nbytes for event in events if isinstance(event, Data)] == [16_384, 1000]
