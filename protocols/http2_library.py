"""The h2 library as our HTTP/2 machine uses it: its set-up, and every name of it that its documentation does not promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import final

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, ConnectionState, H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamInputs
from h2.utilities import HeaderValidationFlags, normalize_inbound_headers, validate_headers

from protocols.http2_frames import PREFACE, headers, settings, window_update
from protocols.http2_hpack import RememberingDecoder, StatelessEncoder

REMEMBERED = 1024
"""Closed streams that are remembered, to tell late frames from impossible ones (h2's own default is 65,536)."""
_REQUEST = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)


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
        self.encoder: StatelessEncoder = StatelessEncoder()
        self.decoder: RememberingDecoder = RememberingDecoder()
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

    def consume(self, stream: H2Stream | None, n: int) -> bool:
        """Counts n received bytes against the connection's window and the stream's, for DATA that h2 does not see; False,
        and nothing counted, if a window is too small. An empty frame may always come, also while a smaller
        INITIAL_WINDOW_SIZE has made the window negative."""
        connection = self._inbound_flow_control_window_manager
        own = connection if stream is None else stream._inbound_window_manager
        if n > connection.current_window_size or n > own.current_window_size:
            return not n
        connection.current_window_size -= n
        if own is not connection:
            own.current_window_size -= n
        return True

    def end_received(self, stream: H2Stream) -> None:
        """Moves the stream's state as END_STREAM does, for a DATA frame that h2 does not see."""
        stream.state_machine.process_input(StreamInputs.RECV_END_STREAM)

    def end_sent(self, stream: H2Stream) -> None:
        """Moves the states as `end_stream` does, for an END_STREAM that h2 does not write."""
        self.state_machine.process_input(ConnectionInputs.SEND_DATA)
        stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)

    def opens(self, stream: int) -> bool:
        """Whether h2 would open this stream for a request in one HEADERS frame, if its head is in order."""
        new = stream > self.highest_inbound_stream_id and stream & 1 and not self.incoming_buffer._headers_buffer
        return bool(new) and self.state_machine.state is ConnectionState.SERVER_OPEN

    def open_inbound(self, stream: int, content_length: int | None, *, ended: bool) -> H2Stream:
        """Opens a stream that `opens` as h2 does for the HEADERS of a request, which it does not see."""
        self._sweep()
        opened = H2Stream(
            stream, self.config, self.local_settings.initial_window_size, self.remote_settings.initial_window_size
        )
        opened.max_outbound_frame_size = self.max_outbound_frame_size
        opened.state_machine.process_input(StreamInputs.RECV_HEADERS)
        if ended:
            opened.state_machine.process_input(StreamInputs.RECV_END_STREAM)
        opened._expected_content_length = content_length
        self.streams[stream] = opened
        self.highest_inbound_stream_id = stream
        return opened

    def response(self, stream: H2Stream, block: bytes, *, interim: bool) -> bytes:
        """The frames of a response head whose fields are checked and encoded; moves the states as `send_headers` does."""
        self.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
        stream.state_machine.process_input(StreamInputs.SEND_INFORMATIONAL_HEADERS if interim else StreamInputs.SEND_HEADERS)
        return headers(stream.stream_id, self.encoder.opening() + block, self.max_outbound_frame_size)

    def grant(self, increment: int, stream: H2Stream | None = None) -> bytes:
        """The WINDOW_UPDATE for the stream, or for the connection, that `increment_flow_control_window` would write."""
        self.state_machine.process_input(ConnectionInputs.SEND_WINDOW_UPDATE)
        if stream is None:
            self._inbound_flow_control_window_manager.window_opened(increment)
            return window_update(0, increment)
        stream.state_machine.process_input(StreamInputs.SEND_WINDOW_UPDATE)
        stream._inbound_window_manager.window_opened(increment)
        return window_update(stream.stream_id, increment)


def joined_cookies(headers: Sequence[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """A request's header list with its cookie crumbs in one field, as h2 reports it (RFC 9113 section 8.2.3)."""
    return list(normalize_inbound_headers(headers, _REQUEST))


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
        (probe.incoming_buffer, "_headers_buffer"),
        (probe.decoder.header_table, "_current_size"),
        (stream, "_inbound_window_manager"),
        (stream, "_expected_content_length"),
        (stream, "state_machine"),
        (stream, "outbound_flow_control_window"),
    )
    missing = [name for holder, name in wanted if not hasattr(holder, name)]
    if missing:
        raise ImportError(f"h2 {version('h2')} has no {', '.join(missing)}; use h2 4.4")


_check_names()
