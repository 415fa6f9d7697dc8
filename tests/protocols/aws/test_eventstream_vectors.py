"""The published event-stream vectors: what AWS's own codecs accept, we read and write alike; what they refuse, we refuse."""

import base64
import json
import uuid
from pathlib import Path
from zlib import crc32

import pytest

from protocols.aws.eventstream import Byte, Decoder, EventMessage, Integer, Long, Short, Timestamp, encode
from protocols.errors import RemoteProtocolError

VECTORS = Path(__file__).parents[2] / "vectors" / "eventstream"
GO = VECTORS / "aws-sdk-go"
RUST = VECTORS / "smithy-rs"

GO_VALUES = {
    0: bool,
    1: bool,
    2: Byte,
    3: Short,
    4: Integer,
    5: Long,
    6: base64.b64decode,
    7: lambda v: base64.b64decode(v).decode(),
    8: Timestamp,
    9: lambda v: uuid.UUID(bytes=base64.b64decode(v)),
}
RUST_MESSAGES = {
    "valid_empty_payload": EventMessage(headers={"some-header": Short(500)}),
    "valid_no_headers": EventMessage(payload=b"another test payload"),
    "valid_with_all_headers_and_payload": EventMessage(
        headers={
            "true": True,
            "false": False,
            "byte": Byte(50),
            "short": Short(20000),
            "int": Integer(500000),
            "long": Long(50000000000),
            "bytes": b"some bytes",
            "str": "some str",
            "time": Timestamp(5000000000),
            "uuid": uuid.UUID("b79bc914-de21-4e13-b8b2-bc47e85b7f0b"),
        },
        payload=b"some payload",
    ),
}


def names(folder):
    found = sorted(path.name for path in folder.iterdir())
    assert found
    return found


def decode(data):
    decoder = Decoder()
    decoder.receive_data(data)
    message = decoder.next_message()
    decoder.receive_eof()
    assert decoder.buffered == 0
    return message


@pytest.mark.parametrize("name", names(GO / "encoded" / "positive"))
def test_a_good_go_vector_decodes_to_its_json_and_encodes_back_to_its_bytes(name):
    data = (GO / "encoded" / "positive" / name).read_bytes()
    told = json.loads((GO / "decoded" / "positive" / name).read_text())
    message = decode(data)
    assert list(message.headers.items()) == [(h["name"], GO_VALUES[h["type"]](h["value"])) for h in told["headers"] or ()]
    assert message.payload == base64.b64decode(told["payload"])
    assert len(data) == told["total_length"]
    assert encode(message) == data


@pytest.mark.parametrize("name", names(GO / "encoded" / "negative"))
def test_a_bad_go_vector_is_refused_for_the_reason_its_text_gives(name):
    complaint = (GO / "decoded" / "negative" / name).read_text().split()[0].lower()
    with pytest.raises(RemoteProtocolError, match=f"{complaint} CRC"):
        decode((GO / "encoded" / "negative" / name).read_bytes())


@pytest.mark.parametrize("name", sorted(RUST_MESSAGES))
def test_a_good_rust_vector_decodes_to_what_is_documented_and_encodes_back_to_its_bytes(name):
    data = (RUST / name).read_bytes()
    assert decode(data) == RUST_MESSAGES[name]
    assert encode(RUST_MESSAGES[name]) == data


@pytest.mark.parametrize("name", [n for n in names(RUST) if n.startswith("invalid_")])
def test_a_bad_rust_vector_is_refused(name):
    with pytest.raises(RemoteProtocolError):
        decode((RUST / name).read_bytes())


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("invalid_header_name_length", "header name needs 255 bytes"),
        ("invalid_header_name_length_too_long", "header name needs 102 bytes"),
        ("invalid_header_string_length_cut_off", "header 'str' needs 2 bytes, 1 are left"),
        ("invalid_header_string_value_length", "header 'str': value of 65535 bytes"),
        ("invalid_header_value_type", "header 'byte': type 96"),
    ],
)
def test_a_bad_header_is_refused_for_itself_when_the_checksum_is_right(name, complaint):
    data = (RUST / name).read_bytes()
    body = data[: int.from_bytes(data[:4], "big") - 4]  # one file is longer than the message in it
    with pytest.raises(RemoteProtocolError, match=complaint):
        decode(body + crc32(body).to_bytes(4, "big"))
