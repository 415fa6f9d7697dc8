"""The h2 library as our HTTP/2 machine uses it: its set-up, and the way through its own objects for what is not plain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from h2.windows import WindowManager
from hpack import Decoder, Encoder, HeaderTuple
from hpack.exceptions import HPACKError, OversizedHeaderListError

from protocols.events import Headers
from protocols.http2.frames import LARGEST_DATA, PREFACE, HTTP2Frame, Kind, settings
from protocols.http2.heads import check_fields, response_fields

REMEMBERED = 1024
"""Closed streams that are remembered, to tell late frames from impossible ones (h2's own default is 65,536)."""


_NO_WINDOW = WindowManager(0)


class CompressionError(ProtocolError):
    """A header block that HPACK cannot decode ends the connection with this code (RFC 9113 section 4.3); h2's own is
    PROTOCOL_ERROR."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class LibraryDecoder(Decoder):
    """hpack's decoder as h2 shall see it. Its errors have their code, and content-length is kept from h2, which ends the
    connection where a length is wrong and the stream alone should end (RFC 9113 section 8.1.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: Sequence[tuple[bytes, bytes]] = ()
        """The whole list of the last block."""

    def decode(self, data: bytes, raw: bool = False) -> list[HeaderTuple]:
        """What h2 gets to see of a block."""
        try:
            fields = list(super().decode(data, raw))
        except OversizedHeaderListError:
            raise
        except (HPACKError, IndexError, TypeError, UnicodeDecodeError) as error:
            raise CompressionError(f"Error decoding header block: {error}") from error
        self.fields = fields
        return [field for field in fields if field[0] != b"content-length"]


class _LibraryEncoder(Encoder):
    """hpack's encoder, with a table that becomes smaller when the peer says so, and never larger than it begins, which
    every later setting allows: hpack would announce each size between, and keep as much as a peer allows."""

    @property
    def header_table_size(self) -> int:
        return int(self.header_table.maxsize)

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        if value < self.header_table_size:
            Encoder.header_table_size.__set__(self, value)  # type: ignore[attr-defined]


class LibraryPath(H2Connection):
    """An H2Connection that is started, with its first SETTINGS in `opening` (the preface before them for a client).

    Heads are not validated inside h2, where a malformed one would end the connection, but by the same functions of h2
    through `http2_heads.malformed`, so that it ends its stream alone (RFC 9113 section 8.1.1).

    The methods say which bytes go out where the payload path (`http2.payload`) makes them itself; here h2 makes them.
    """

    MAX_CLOSED_STREAMS = REMEMBERED

    def __init__(self, *, client: bool, streams: int, initial_window: int, frame_size: int, head: int) -> None:
        super().__init__(
            H2Configuration(
                client_side=client, header_encoding=None, validate_inbound_headers=False, validate_outbound_headers=True
            )
        )
        self.encoder: Encoder = self.make_encoder()
        self.decoder: LibraryDecoder = self.make_decoder()
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
        self.sweep_at = 64
        """How many streams h2 may hold before those of them that are closed are moved out."""
        if not client:
            self.receive_data(PREFACE)

    def close(self) -> None:
        """Nothing is received any more: h2's table of its own methods is a cycle, which would keep all of it until the
        collector comes."""
        getattr(self, "_frame_dispatch_table", {}).clear()

    def make_encoder(self) -> Encoder:
        """The HPACK encoder of the connection."""
        return _LibraryEncoder()

    def make_decoder(self) -> LibraryDecoder:
        """The HPACK decoder of the connection."""
        return LibraryDecoder()

    @property
    def open_inbound_streams(self) -> int:
        """Always 0: the machine counts, because it refuses a stream (REFUSED_STREAM) where h2 ends the connection."""
        self.sweep()
        return 0

    @property
    def open_outbound_streams(self) -> int:
        """Always 0: the machine counts."""
        self.sweep()
        return 0

    def sweep(self) -> None:
        """To count is also h2's moment to move closed streams out of `streams`, which looks at each stream; doing that
        only when their number has doubled keeps the cost of a new stream independent of the others."""
        if len(self.streams) >= self.sweep_at:
            _ = super().open_inbound_streams
            self.sweep_at = 64 + 2 * len(self.streams)

    def inbound(self, stream: H2Stream | None) -> WindowManager:
        """Where a plain DATA frame is counted, for the stream or the connection: h2's own count on the payload path, and
        here a window in which there is no room for any, so that h2 gets them all."""
        return _NO_WINDOW

    def payload(self, stream: H2Stream, frame: HTTP2Frame) -> bytes | None:
        """The payload of a DATA frame that h2 need not see, counted and its END_STREAM done; None, and nothing done, if
        h2 is to be given the frame."""
        return None

    def discard(self, frame: HTTP2Frame) -> int:
        """Counts a DATA frame that came too late for its stream, which is over from now on if it was not. Says what h2
        gave back to the connection of its own accord. Raises h2's ProtocolError for a frame that can never come."""
        self.receive_data(frame.head + frame.payload)
        # The RST_STREAM is the machine's to decide on.
        written = self.data_to_send()
        frames = [written[at : at + 13] for at in range(0, len(written), 13)]
        return sum(int.from_bytes(each[9:]) for each in frames if each[3] == Kind.WINDOW_UPDATE)

    def response(self, stream: H2Stream, status: int, headers: Headers, date: Headers) -> bytes:
        """The frames of a response head with these fields, and those of its `date`, which is not changed and may be the same
        object often; LocalProtocolError, and nothing changed, for fields that HTTP/2 cannot carry."""
        self.send_headers(stream.stream_id, response_fields(status, [*headers, *date]))
        return self.data_to_send()

    def data(
        self, stream: H2Stream, pieces: Iterable[bytes | memoryview], n: int, end: bool, out: list[bytes | memoryview]
    ) -> None:
        """Appends DATA frames to `out`, all but the last of LARGEST_DATA, with pieces of n bytes, which both windows allow.
        With `end` the last one ends the stream."""
        data = b"".join(pieces)
        for at in range(0, n, LARGEST_DATA):
            last = end and at + LARGEST_DATA >= n
            self.send_data(stream.stream_id, data[at : at + LARGEST_DATA], end_stream=last)
            out.append(self.data_to_send())

    def check_trailers(self, trailers: Headers) -> None:
        """LocalProtocolError for fields that HTTP/2 cannot carry behind a body."""
        check_fields(trailers)

    def end(self, stream: H2Stream, trailers: Headers) -> bytes:
        """The frames that end our direction behind its last payload: of trailers, which were checked, or else an empty DATA
        frame."""
        if trailers:
            self.send_headers(stream.stream_id, trailers, end_stream=True)
        else:
            self.end_stream(stream.stream_id)
        return self.data_to_send()

    def reset(self, stream: int, code: int) -> bytes:
        """The RST_STREAM of a stream that exists; empty if it is closed already."""
        try:
            self.reset_stream(stream, code)
        except StreamClosedError:
            return b""
        return self.data_to_send()

    def grant(self, increment: int, stream: H2Stream | None = None) -> bytes:
        """The WINDOW_UPDATE for the stream, or for the connection."""
        self.increment_flow_control_window(increment, None if stream is None else stream.stream_id)
        return self.data_to_send()
