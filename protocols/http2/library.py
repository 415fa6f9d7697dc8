"""The h2 library as our HTTP/2 machine uses it: its set-up, and the way through its own objects."""

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
"""Closed streams that are remembered to tell late frames from impossible ones (h2's own default is 65,536)."""


_NO_WINDOW = WindowManager(0)


class CompressionError(ProtocolError):
    """A header block that HPACK cannot decode. It ends the connection with COMPRESSION_ERROR (RFC 9113 section 4.3); h2
    would use PROTOCOL_ERROR."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class LibraryDecoder(Decoder):
    """The decoder that h2 gets. Its errors have the right code. It hides content-length from h2, which would end the whole
    connection over a wrong length, and not just the stream (RFC 9113 section 8.1.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: Sequence[tuple[bytes, bytes]] = ()
        """The whole list of the last block."""

    def decode(self, data: bytes, raw: bool = False) -> list[HeaderTuple]:
        """Decodes a block and returns the fields that h2 may see."""
        try:
            fields = list(super().decode(data, raw))
        except OversizedHeaderListError as error:
            limit = self.max_header_list_size
            raise OversizedHeaderListError(f"the list has more than {limit} bytes, twice limits.head") from error
        except (HPACKError, IndexError, TypeError, UnicodeDecodeError) as error:
            raise CompressionError(f"Error decoding header block: {error}") from error
        self.fields = fields
        return [field for field in fields if field[0] != b"content-length"]


class _LibraryEncoder(Encoder):
    """hpack's encoder, with a table that follows the peer only to smaller sizes. Every later setting allows such a table.
    hpack itself would announce each size in between, and use as much as a peer allows."""

    @property
    def header_table_size(self) -> int:
        return int(self.header_table.maxsize)

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        if value < self.header_table_size:
            Encoder.header_table_size.__set__(self, value)  # type: ignore[attr-defined]


class LibraryPath(H2Connection):
    """An H2Connection that has started. `opening` is its first SETTINGS, for a client behind the preface.

    h2 does not validate heads itself here, because it would end the connection over a malformed one. `heads.malformed` calls
    the same functions of h2, so that a malformed head ends its stream alone (RFC 9113 section 8.1.1).

    The payload path (`http2.payload`) overrides methods here to make the same bytes itself; here h2 makes them.
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
        # As initial values, these two would be advertised without being accepted (MAX_FRAME_SIZE), or counted differently by
        # the two ends (INITIAL_WINDOW_SIZE). They take effect when the peer acknowledges them.
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
        # Twice the advertised size, so that a head somewhat too large can be answered. A larger one ends the connection.
        self.decoder.max_header_list_size = 2 * head
        self.sweep_at = 64
        """The number of streams that h2 may hold before the closed ones are moved out."""
        if not client:
            self.receive_data(PREFACE)

    def close(self) -> None:
        """Breaks a reference cycle, because nothing more is received: h2's table of its own methods would keep everything
        alive until the garbage collector runs."""
        getattr(self, "_frame_dispatch_table", {}).clear()

    def make_encoder(self) -> Encoder:
        """The HPACK encoder of the connection."""
        return _LibraryEncoder()

    def make_decoder(self) -> LibraryDecoder:
        """The HPACK decoder of the connection."""
        return LibraryDecoder()

    @property
    def open_inbound_streams(self) -> int:
        """Always 0: the machine itself counts, because it refuses a stream (REFUSED_STREAM) for which h2 ends the
        connection."""
        self.sweep()
        return 0

    @property
    def open_outbound_streams(self) -> int:
        """Always 0: the machine itself counts."""
        self.sweep()
        return 0

    def sweep(self) -> None:
        """Moves closed streams out of `streams` if their number has doubled. h2 does that whenever it counts, and looks at
        every stream then; doing it rarely keeps the cost of a new stream independent of the others."""
        if len(self.streams) >= self.sweep_at:
            _ = super().open_inbound_streams
            self.sweep_at = 64 + 2 * len(self.streams)

    def inbound(self, stream: H2Stream | None) -> WindowManager:
        """The window that plain DATA frames of the stream, or of the connection, are counted against. On the payload path it
        is h2's own. Here it is one without room for any, so that h2 gets all frames."""
        return _NO_WINDOW

    def payload(self, stream: H2Stream, frame: HTTP2Frame) -> bytes | None:
        """The payload of a DATA frame that h2 need not see, once it and its END_STREAM are counted. None, and nothing done,
        if h2 must get the frame."""
        return None

    def discard(self, frame: HTTP2Frame) -> int:
        """Counts a DATA frame that came too late for its stream; the stream is over from now on. Returns the bytes of window
        that h2 gave back to the connection itself. h2's ProtocolError for a frame that can never come."""
        self.receive_data(frame.head + frame.payload)
        # The machine decides on the RST_STREAM.
        written = self.data_to_send()
        frames = [written[at : at + 13] for at in range(0, len(written), 13)]
        return sum(int.from_bytes(each[9:]) for each in frames if each[3] == Kind.WINDOW_UPDATE)

    def response(self, stream: H2Stream, status: int, headers: Headers, date: Headers) -> bytes:
        """The frames of a response head with these fields and those of `date`, a constant object that may be the same for
        many heads. LocalProtocolError, and nothing changed, for fields that HTTP/2 cannot carry."""
        self.send_headers(stream.stream_id, response_fields(status, [*headers, *date]))
        return self.data_to_send()

    def data(
        self, stream: H2Stream, pieces: Iterable[bytes | memoryview], n: int, end: bool, out: list[bytes | memoryview]
    ) -> None:
        """Appends DATA frames to `out` for pieces of n bytes, which both windows must allow. All frames but the last have
        LARGEST_DATA bytes. With `end` the last one ends the stream."""
        data = b"".join(pieces)
        for at in range(0, n, LARGEST_DATA):
            last = end and at + LARGEST_DATA >= n
            self.send_data(stream.stream_id, data[at : at + LARGEST_DATA], end_stream=last)
            out.append(self.data_to_send())

    def check_trailers(self, trailers: Headers) -> None:
        """Raises LocalProtocolError for trailers that HTTP/2 cannot carry."""
        check_fields(trailers)

    def end(self, stream: H2Stream, trailers: Headers) -> bytes:
        """The frames that end our direction behind its last payload: the trailers, which must be checked, or an empty DATA
        frame."""
        if trailers:
            self.send_headers(stream.stream_id, trailers, end_stream=True)
        else:
            self.end_stream(stream.stream_id)
        return self.data_to_send()

    def reset(self, stream: int, code: int) -> bytes:
        """The RST_STREAM of a stream that exists. Empty if the stream is closed already."""
        try:
            self.reset_stream(stream, code)
        except StreamClosedError:
            return b""
        return self.data_to_send()

    def grant(self, increment: int, stream: H2Stream | None = None) -> bytes:
        """The WINDOW_UPDATE for the stream, or for the connection."""
        self.increment_flow_control_window(increment, None if stream is None else stream.stream_id)
        return self.data_to_send()
