"""The h2 library as our HTTP/2 machine uses it: its set-up, and every name of it that its documentation does not promise."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamInputs
from h2.utilities import HeaderValidationFlags, validate_headers

from protocols.http2_frames import PREFACE, settings

REMEMBERED = 1024
"""Closed streams that are remembered, to tell late frames from impossible ones (h2's own default is 65,536)."""
TABLE = 4096
"""The HPACK table of our encoder at most (RFC 9113 section 6.5.2): a peer that allows more does not make us hold more."""


@final
class Library(H2Connection):
    """An H2Connection that is started, with its first SETTINGS in `opening` (the preface before them for a client).

    Heads are not validated inside h2, where a malformed one would end the connection, but by the same functions of h2
    through `malformed`, so that it ends its stream alone (RFC 9113 section 8.1.1).
    """

    MAX_CLOSED_STREAMS = REMEMBERED

    def __init__(self, *, client: bool, streams: int, initial_window: int, frame_size: int, head: int) -> None:
        super().__init__(
            H2Configuration(
                client_side=client, header_encoding=None, validate_inbound_headers=False, validate_outbound_headers=True
            )
        )
        first: dict[SettingCodes | int, int] = {
            SettingCodes.MAX_CONCURRENT_STREAMS: streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: head,
        }
        if client:
            first[SettingCodes.ENABLE_PUSH] = 0
        # Given as initial values, these two would be advertised without being accepted (MAX_FRAME_SIZE) or make the
        # two ends count differently (INITIAL_WINDOW_SIZE): they take effect when the peer acknowledges them.
        later: dict[SettingCodes | int, int] = {
            SettingCodes.INITIAL_WINDOW_SIZE: initial_window,
            SettingCodes.MAX_FRAME_SIZE: frame_size,
        }
        self.local_settings = Settings(client=client, initial_values={SettingCodes(k): v for k, v in first.items()})
        self.initiate_connection()
        self.update_settings(later)
        # h2 would write two SETTINGS frames and take the acknowledgement of the first for that of the second.
        self.data_to_send()
        self.opening = (PREFACE if client else b"") + settings({int(k): v for k, v in (first | later).items()})
        # Twice what is advertised, so that a head somewhat too large can be answered; beyond it the connection ends.
        self.decoder.max_header_list_size = 2 * head
        self._sweep_at = 64
        if not client:
            self.receive_data(PREFACE)

    @property
    def open_inbound_streams(self) -> int:
        """Always 0: the machine counts, because it refuses a stream (REFUSED_STREAM) where h2 ends the connection."""
        self._sweep()
        return 0

    @property
    def open_outbound_streams(self) -> int:
        """Always 0: the machine counts."""
        self._sweep()
        return 0

    def _sweep(self) -> None:
        # To count is also h2's moment to move closed streams out of `streams`, which looks at each stream; doing that
        # only when their number has doubled keeps the cost of a new stream independent of the others.
        if len(self.streams) >= self._sweep_at:
            _ = super().open_inbound_streams
            self._sweep_at = 64 + 2 * len(self.streams)

    def consume(self, stream: H2Stream | None, n: int) -> None:
        """Counts n received bytes against the connection's window and the stream's, for DATA that h2 does not see."""
        if n == 0:
            return  # h2 refuses also nothing when a window is negative
        self._inbound_flow_control_window_manager.window_consumed(n)
        if stream is not None:
            stream._inbound_window_manager.window_consumed(n)

    def end_received(self, stream: H2Stream) -> None:
        """Moves the stream's state as END_STREAM does, for a DATA frame that h2 does not see."""
        stream.state_machine.process_input(StreamInputs.RECV_END_STREAM)

    def bound_encoder(self) -> None:
        """To be called after the peer's SETTINGS: holds our HPACK table to TABLE and announces changes of it at most twice.

        RFC 7541 section 4.2 wants the smallest and the last size since the last header block; hpack would write all,
        and forget them when the last SETTINGS repeats a value.
        """
        encoder = self.encoder
        if encoder.header_table_size > TABLE:
            encoder.header_table_size = TABLE
        if encoder.table_size_changes:
            smallest, last = min(encoder.table_size_changes), encoder.table_size_changes[-1]
            encoder.table_size_changes = [last] if smallest == last else [smallest, last]
            encoder.header_table.resized = True


def malformed(headers: Iterable[tuple[bytes, bytes]], *, response: bool = False, trailers: bool = False) -> str:
    """What h2 finds wrong with a received header list, cut to 200 characters; empty if nothing."""
    flags = HeaderValidationFlags(is_client=False, is_trailer=trailers, is_response_header=response, is_push_promise=False)
    try:
        for _ in validate_headers(headers, flags):
            pass
    except ProtocolError as error:
        return str(error)[:200] or "malformed header list"
    return ""


def _check_names() -> None:
    """Without these names the windows would be counted wrongly, so there is nothing to fall back to."""
    probe = H2Connection()
    stream = H2Stream(1, probe.config, 0, 0)
    wanted = (
        (probe, "_inbound_flow_control_window_manager"),
        (stream, "_inbound_window_manager"),
        (stream, "state_machine"),
        (stream, "outbound_flow_control_window"),
        (probe.encoder, "table_size_changes"),
        (probe.encoder, "header_table"),
    )
    missing = [name for holder, name in wanted if not hasattr(holder, name)]
    if missing:
        raise ImportError(f"h2 {version('h2')} has no {', '.join(missing)}; use h2 4.4")


_check_names()
