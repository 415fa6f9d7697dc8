"""The machine's own path and wsproto's: the same events, errors, bytes and ledgers after every step."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.events import Frame, Opcode
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from tests.protocols.websocket.websocket_paths import run


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_both_paths_do_the_same_over_any_bytes_and_any_use(seed: int) -> None:
    run(random.Random(seed))


@pytest.mark.parametrize("payload_path", [True, False])
def test_text_fragments_pass_byte_for_byte_wherever_a_character_is_cut(payload_path: bool) -> None:
    keys = [b"\1\2\3\4"] * 2
    sender = WebSocketConnection(Role.CLIENT, mask=keys.pop, payload_path=payload_path)
    receiver = WebSocketConnection(Role.SERVER, payload_path=payload_path)
    frames = [
        Frame(opcode=Opcode.TEXT, fin=False, data=b"\xe2\x82"),
        Frame(opcode=Opcode.CONTINUATION, fin=True, data=b"\xac\xff"),
    ]
    for frame in frames:
        sender.send(frame)
    receiver.receive_data(b"".join(sender.data_to_send()))
    assert [receiver.next_event(), receiver.next_event()] == frames


# In an interpreter of its own: the module looks at wsproto once, when it is imported.
BROKEN = """
import warnings, wsproto.connection
%s
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from protocols.websocket import WebSocketConnection
from protocols.events import Close, Ping
from protocols.roles import Role
assert [w.category for w in caught] == [RuntimeWarning], caught
machine = WebSocketConnection(Role.SERVER)
machine.receive_data(bytes.fromhex("898537fa213d7f9f4d5158" "888237fa213d3412"))
assert [machine.next_event(), machine.next_event()] == [Ping(data=b"Hello"), Close(code=1000)]
assert b"".join(machine.data_to_send()) == bytes.fromhex("8a0548656c6c6f" "880203e8")
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    "change",
    [
        pytest.param("del wsproto.connection.Connection", id="a name is gone"),
        pytest.param("wsproto.connection.Connection.events = lambda self: iter(())", id="it says nothing"),
        pytest.param(
            "wsproto.connection.Connection.state = wsproto.connection.ConnectionState.OPEN", id="a Close leaves no state"
        ),
    ],
)
def test_where_wsproto_is_not_as_the_payload_path_needs_it_a_warning_says_so_and_everything_goes_through_it(
    change: str,
) -> None:
    subprocess.run([sys.executable, "-c", BROKEN % change], check=True)
