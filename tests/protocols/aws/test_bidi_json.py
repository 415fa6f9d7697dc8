"""The bidirectional dialect in the beta document's JSON: events with JSON payloads, literal objects, and answers in kind."""

import base64
import json
import tracemalloc
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws import bidi, bidi_json
from protocols.aws.bidi import (
    ENCODERS,
    END,
    Completion,
    DataType,
    Form,
    LiteralDecoder,
    PartDecoder,
    PayloadPart,
    ResponseDecoder,
    encode_envelope,
    encode_json_event,
    encode_literal_internal_stream_failure,
    encode_literal_model_stream_error,
    encode_literal_part,
    encode_request_event,
)
from protocols.aws.bidi_json import HEADROOM, MAX_DEPTH, MAX_VALUES
from protocols.aws.eventstream import encode_buffers
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA

EVENT = {":message-type": "event", ":event-type": "PayloadPart"}
JSON = {":content-type": "application/json"}
MIB_16 = 16 * 2**20


def joined(buffers):
    return b"".join(buffers)


def part(data, data_type=DataType.BINARY, completion=Completion.COMPLETE, content_type=""):
    return PayloadPart(data=data, data_type=data_type, completion=completion, content_type=content_type)


def json_part(*told, content_type="application/json"):
    return part(*told, content_type=content_type)


def event(payload, headers=JSON):
    return joined(encode_buffers(EVENT | headers, payload))


def sealed(wire):
    return joined(encode_envelope(wire, date_ms=0))


def pull(decoder):
    while (step := decoder.next_part()) not in (NEED_DATA, END):
        yield step


def told(decoder, pieces):
    """The parts, and at the end END or the error's text."""
    got = []
    try:
        for piece in pieces:
            decoder.receive_data(piece)
            got.extend(pull(decoder))
        decoder.receive_eof()
        got.extend(pull(decoder))
        got.append(decoder.next_part())
    except RemoteProtocolError as error:
        assert (decoder.buffered, decoder.need) == (0, 0)
        got.append(str(error))
    return got


def literal(text, **limits):
    return told(LiteralDecoder(**limits), [text.encode() if isinstance(text, str) else text])


def wrapped(text):
    return '{"PayloadPart":' + text + "}"


def every_cut(wire):
    yield from ([wire[:at], wire[at:]] for at in range(len(wire) + 1))
    yield [wire[at : at + 1] for at in range(len(wire))]


# Texts of PayloadPart, and the part that both readings give.
RIGHT = [
    ('{"Bytes":"aGk="}', part(b"hi")),
    ('{"Bytes":""}', part(b"")),
    ('{"Bytes":"\\u0061Gk\\u003d"}', part(b"hi")),
    ('{"Bytes":"\\/+8="}', part(b"\xff\xef")),
    ('{"Bytes":"aGl="}', part(b"hi")),  # bits behind the last byte: RFC 4648 section 3.5 leaves them to the reader
    (' { "Bytes" : "aGk=" , "DataType" : "UTF8" }\r\n\t', part(b"hi", DataType.UTF8)),
    ('{"Bytes":"aGk=","DataType":"BINARY","CompletionState":"COMPLETE","P":"xxx"}', part(b"hi")),
    (
        '{"P":"}{\\"][","CompletionState":"PARTIAL","DataType":"UTF8","Bytes":"aGk="}',
        part(b"hi", DataType.UTF8, Completion.PARTIAL),
    ),
    # The seed's text says CompletionStatus, its examples CompletionState.
    ('{"Bytes":"aGk=","CompletionStatus":"PARTIAL"}', part(b"hi", completion=Completion.PARTIAL)),
    (
        '{"Bytes":"aGk=","CompletionStatus":"PARTIAL","CompletionState":"PARTIAL"}',
        part(b"hi", completion=Completion.PARTIAL),
    ),
    ('{"Bytes":"aGk=","CompletionStatus":"PARTIAL","CompletionState":null}', part(b"hi", completion=Completion.PARTIAL)),
    ('{"Bytes":"aGk=","DataType":null,"CompletionState":null,"CompletionStatus":null,"P":null}', part(b"hi")),
    ('{"Bytes":"aGk=","bytes":1,"New":{"a":[{},"]}",-1.5e3,true]},"":null}', part(b"hi")),
    ('{"Bytes":"aGk=","P":"\\u00e9\\ud83d\\ude00é:"}', part(b"hi")),
]
WRONG = [
    ("{}", "PayloadPart must have Bytes, a base64 string"),
    ('{"Bytes":null}', "PayloadPart must have Bytes"),
    ('{"bytes":"aGk="}', "PayloadPart must have Bytes"),
    ('{"Bytes":1}', "Expected `bytes | null`, got `int`"),
    ('{"Bytes":["aGk="]}', "got `array`"),
    ('{"Bytes":"aGk"}', "base64 has the standard alphabet, padding, and no white space"),
    ('{"Bytes":"aGk=aGk="}', "base64"),
    ('{"Bytes":"aGk= "}', "base64"),
    ('{"Bytes":"aG\\nk="}', "base64"),
    ('{"Bytes":"aG-_"}', "base64"),
    ('{"Bytes":"a==="}', "base64"),
    ('{"Bytes":"é"}', "base64"),
    ('{"Bytes":"aGk=","DataType":"utf8"}', "DataType must be 'UTF8' or 'BINARY', got 'utf8'"),
    ('{"Bytes":"aGk=","DataType":""}', "DataType must be 'UTF8' or 'BINARY', got ''"),
    ('{"Bytes":"aGk=","DataType":1}', "Expected `str"),
    ('{"Bytes":"aGk=","P":1}', "Expected `str"),
    ('{"Bytes":"aGk=","CompletionState":"DONE"}', "CompletionState must be 'PARTIAL' or 'COMPLETE', got 'DONE'"),
    ('{"Bytes":"aGk=","CompletionStatus":"DONE"}', "CompletionState must be 'PARTIAL' or 'COMPLETE', got 'DONE'"),
    (
        '{"Bytes":"aGk=","CompletionState":"PARTIAL","CompletionStatus":"COMPLETE"}',
        "CompletionState is 'PARTIAL' and CompletionStatus is 'COMPLETE'",
    ),
    ('{"Bytes":"aGk=","Bytes":"aGk="}', "two members 'Bytes'"),
    ('{"Bytes":"aGk=","x":{"y":1,"y":2}}', "two members 'y'"),
    ('{"Bytes":"aGk=","x":NaN}', "not JSON"),
    ('{"Bytes":"aGk=","x":01}', "not JSON"),
    ('{"Bytes":"aGk=","x":' + "1" * 401 + "}", "number of more than 400 characters"),
    ('{"Bytes":"aGk=","x":"\\ud800"}', "not JSON"),
    ('{"Bytes":"aGk=",}', "not JSON"),
    ('{"Bytes":"aGk=" "x":1}', "not JSON"),
    ('{"Bytes":"aGk=","x":[}]}', "not JSON"),
    ("{'Bytes':'aGk='}", "not JSON"),
    ('{"Bytes":"aGk="/**/}', "not JSON"),
    ('{"Bytes":"aGk=","P":"\t"}', "not JSON"),
]


# ---- reading 1: events with JSON payloads


@pytest.mark.parametrize(("wrap", "form"), [*product([sealed, bytes], [str, wrapped])])
@pytest.mark.parametrize(("text", "expected"), RIGHT)
def test_a_json_event_is_the_part_that_its_members_say(text, expected, wrap, form):
    decoder = PartDecoder()
    assert decoder.form is Form.EVENT_STREAM
    got = told(decoder, [wrap(event(form(text).encode()))])
    assert got == [json_part(expected.data, expected.data_type, expected.completion), END]
    assert type(got[0].data) is bytes
    assert decoder.form is Form.JSON_EVENTS


@pytest.mark.parametrize("form", [str, wrapped])
@pytest.mark.parametrize(
    ("text", "complaint"), [*WRONG, ("", "not JSON"), ("[]", "Expected `object"), ("{} {}", "not JSON")]
)
def test_a_json_event_that_is_wrong_ends_the_body(text, complaint, form):
    decoder = PartDecoder()
    (error,) = told(decoder, [event(form(text).encode())])
    assert complaint in error
    assert decoder.form is Form.EVENT_STREAM
    with pytest.raises(RemoteProtocolError):
        decoder.next_part()


def test_a_json_event_is_told_by_the_type_of_its_content_with_whatever_parameters():
    for content_type in ("application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"):
        wire = event(b'{"Bytes":"aGk="}', {":content-type": content_type})
        assert told(PartDecoder(), [wire]) == [json_part(b"hi", content_type=content_type), END]
    for other in ("application/jsonlines", "application/octet-stream", "text/json", b"application/json"):
        (raw, _) = told(PartDecoder(), [event(b'{"Bytes":"aGk="}', {":content-type": other})])
        assert raw.data == b'{"Bytes":"aGk="}'


def test_a_byte_order_mark_before_the_payload_is_skipped():
    for size in (2, 20_000):
        text = b'\xef\xbb\xbf{"Bytes":"%s"}' % base64.b64encode(bytes(size))
        assert told(PartDecoder(), [event(text)]) == [json_part(bytes(size)), END]


def test_bytes_that_are_no_utf_8_are_refused_wherever_they_stand():
    for text in (b'{"Bytes":"aGk=","P":"\xff"}', b'{"Bytes":"aGk=","x":"\xff"}', b'{"Bytes":"aGk=","\xff":1}'):
        assert "UTF-8" in told(PartDecoder(), [event(text)])[0]
        assert "UTF-8" in literal(b'{"PayloadPart":' + text + b"}")[0]


def test_a_payload_nested_deep_is_refused_by_its_depth():
    for deep in (MAX_DEPTH, 100_000):
        text = b'{"Bytes":"aGk=","x":' + b"[" * deep + b"]" * deep + b"}"
        assert told(PartDecoder(), [event(text)]) == ["payload of a JSON event is nested deeper than 64 arrays and objects"]
    text = b'{"Bytes":"aGk=","x":' + b"[" * 63 + b"]" * 63 + b"}"
    assert told(PartDecoder(), [event(text)]) == [json_part(b"hi"), END]


def test_headers_of_a_json_event_count_where_its_members_say_nothing_or_the_same():
    flags = {"DataType": "UTF8", "CompletionStatus": "PARTIAL"}
    for text in (b'{"Bytes":"aGk="}', b'{"Bytes":"aGk=","DataType":"UTF8","CompletionState":"PARTIAL"}'):
        wire = event(text, JSON | flags)
        assert told(PartDecoder(), [wire]) == [json_part(b"hi", DataType.UTF8, Completion.PARTIAL), END]
    (error,) = told(PartDecoder(), [event(b'{"Bytes":"aGk=","DataType":"BINARY"}', JSON | flags)])
    assert error == "DataType is 'UTF8' in the headers and 'BINARY' in the payload"
    (error,) = told(PartDecoder(), [event(b'{"Bytes":"aGk=","CompletionState":"COMPLETE"}', JSON | flags)])
    assert error == "CompletionState is 'COMPLETE' and CompletionStatus is 'PARTIAL'"
    (error,) = told(PartDecoder(), [joined(encode_buffers({":message-type": "event"} | JSON, b'{"Bytes":""}'))])
    assert error.startswith(":event-type must be 'PayloadPart'")


def test_the_form_that_was_shown_once_stays_shown():
    decoder = PartDecoder()
    raw = encode_request_event(b"raw")
    wire = raw + event(b'{"Bytes":"aGk="}') + sealed(raw)
    assert [p.data for p in told(decoder, [wire])[:3]] == [b"raw", b"hi", b"raw"]
    assert decoder.form is Form.JSON_EVENTS


def test_json_events_cut_anywhere_are_the_same():
    wire = (
        sealed(event(b'{"Bytes":"aGk=","P":"x"}')) + event(b'{"PayloadPart":{"Bytes":"","DataType":"UTF8"}}') + sealed(b"")
    )
    for pieces in every_cut(wire):
        assert told(PartDecoder(), pieces) == [json_part(b"hi"), json_part(b"", DataType.UTF8), END]


def test_json_events_are_verified_like_all_others():
    seen = []
    inner = event(b'{"Bytes":"aGk="}')
    decoder = PartDecoder(verify=lambda *message: seen.append(message))
    assert told(decoder, [sealed(inner) + sealed(b"")]) == [json_part(b"hi"), END]
    assert seen == [(0, bytes(32), inner), (0, bytes(32), b"")]


def test_the_limit_of_a_json_event_is_that_of_what_is_sent():
    for size in (90, 30_000):
        wire = event(b'{"Bytes":"%s"}' % base64.b64encode(bytes(size)))
        for wrap in (bytes, sealed):
            assert told(PartDecoder(len(wire)), [wrap(wire)]) == [json_part(bytes(size)), END]
            (error,) = told(PartDecoder(len(wire) - 1), [wrap(wire)])
            assert "the limit" in error


def test_json_headers_are_never_remembered(monkeypatch):
    monkeypatch.setattr(bidi, "_HEADS", {})
    told(PartDecoder(), [event(b'{"Bytes":"aGk="}')])
    assert bidi._HEADS == {}


def test_a_json_event_is_these_bytes():
    wire = joined(encode_json_event(b"hi", DataType.UTF8, Completion.PARTIAL, padding='x"é'))
    headers = (
        b"\x0d:message-type\x07\x00\x05event"
        b"\x0b:event-type\x07\x00\x0bPayloadPart"
        b"\x0d:content-type\x07\x00\x10application/json"
    )
    payload = b'{"Bytes":"aGk=","DataType":"UTF8","CompletionState":"PARTIAL","P":"x\\"\xc3\xa9"}'
    assert wire[12:-4] == headers + payload
    assert joined(encode_json_event(b"", completion=None))[12:-4] == headers + b'{"Bytes":""}'
    assert joined(encode_json_event(b""))[12:-4] == headers + b'{"Bytes":"","CompletionState":"COMPLETE"}'


# ---- reading 2: literal objects


@pytest.mark.parametrize(("text", "expected"), RIGHT)
def test_a_literal_object_is_the_part_that_its_members_say(text, expected):
    assert literal(wrapped(text)) == [expected, END]


@pytest.mark.parametrize(("text", "complaint"), WRONG)
def test_a_literal_object_that_is_wrong_ends_the_body(text, complaint):
    decoder = LiteralDecoder()
    first, error = told(decoder, [(wrapped('{"Bytes":""}') + wrapped(text)).encode()])
    assert first == part(b"")
    assert complaint in error
    decoder.receive_data(b'{"PayloadPart":{"Bytes":""}}')
    with pytest.raises(RemoteProtocolError):
        decoder.next_part()
    assert decoder.buffered == 0


def test_the_seed_s_own_object_is_read():
    text = """
    {
      "PayloadPart": {
        "Bytes": "aGVsbG8=",
        "DataType": "UTF8",
        "CompletionState": "COMPLETE",
        "P": "padding"
      }
    }
    """
    assert literal(text) == [part(b"hello", DataType.UTF8), END]


@pytest.mark.parametrize("space", ["", "\n", " \t\r\n", "\n" * 70_000])
def test_between_objects_stands_white_space_or_nothing(space):
    one, two = '{"PayloadPart":{"Bytes":"YQ=="}}', '{"PayloadPart":{"Bytes":"Yg=="}}'
    assert literal(space + one + space + two + space) == [part(b"a"), part(b"b"), END]


@pytest.mark.parametrize("between", [",", "[", "]", "}", '"', "0", "null", "\x1e", "\0", "\ufeff", "\u00a0", "\x0b"])
def test_anything_else_between_objects_is_refused(between):
    first, error = literal(wrapped('{"Bytes":"YQ=="}') + between + wrapped('{"Bytes":"Yg=="}'))
    assert first == part(b"a")
    assert error.startswith("a literal body is a run of JSON objects: '{' must come next, got b")
    assert len(error) < 200


def test_a_byte_order_mark_may_stand_before_the_first_object_only():
    text = b'{"PayloadPart":{"Bytes":"YQ=="}}'
    mark = b"\xef\xbb\xbf"
    for pieces in every_cut(mark + b" " + text):
        assert told(LiteralDecoder(), pieces) == [part(b"a"), END]
    assert literal(mark) == [END]
    assert "got b'\\xef\\xbb'" in literal(mark[:2])[0]
    assert "got b'\\xef\\xbb\\xbf" in literal(mark + mark + text)[0]


def test_a_body_without_objects_is_at_its_end():
    assert literal("") == literal(" \n ") == [END]
    decoder = LiteralDecoder()
    assert decoder.next_part() is NEED_DATA
    decoder.receive_eof()
    assert [decoder.next_part(), decoder.next_part()] == [END, END]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"Bytes":"aGk="}',
        '{"PayloadPart":null}',
        '{"payloadPart":{"Bytes":"aGk="}}',
        '{"ModelStreamError":{"Message":"x"}}',
    ],
)
def test_a_literal_object_without_a_payload_part_is_refused(text):
    assert literal(text) == ["a literal object must have the member PayloadPart, an object"]


def test_other_members_beside_the_payload_part_are_ignored():
    text = '{"a":{"PayloadPart":[1]},"PayloadPart":{"Bytes":"aGk="},"Bytes":7,"z":null}'
    assert literal(text) == [part(b"hi"), END]
    assert "Expected `object" in literal('{"PayloadPart":[]}')[0]
    assert "two members 'PayloadPart'" in literal('{"PayloadPart":{"Bytes":""},"PayloadPart":{"Bytes":""}}')[0]


HARD = (
    '\n{"PayloadPart":{"P":"}{\\"\\\\","Bytes":"YWI="}} {"x\\\\":"\\\\\\"]","PayloadPart":{"Bytes":"%s","x":[{"y":[]}]}}'
    '{"PayloadPart":{"Bytes":"","P":"é","DataType":"UTF8","CompletionStatus":"PARTIAL"}}\n' % ("QUJD" * 60)
).encode()
HARD_PARTS = [part(b"ab"), part(b"ABC" * 60), part(b"", DataType.UTF8, Completion.PARTIAL), END]


def test_literal_objects_cut_anywhere_are_the_same():
    assert literal(HARD) == HARD_PARTS
    for pieces in every_cut(HARD):
        assert told(LiteralDecoder(), pieces) == HARD_PARTS
        assert told(LiteralDecoder(), map(memoryview, map(bytearray, pieces))) == HARD_PARTS


def test_a_literal_body_cut_off_inside_an_object_is_an_error_at_its_end():
    whole = b'{"PayloadPart":{"P":"\\"","Bytes":"YWI="}}'
    for at in range(1, len(whole)):
        assert literal(whole[:at]) == [f"the body ends inside a literal object, after {at} bytes of it"]
        assert literal(whole + whole[:at])[0] == part(b"ab")
        unpulled = LiteralDecoder()
        unpulled.receive_data(whole + whole[:at])
        unpulled.receive_eof()
        assert unpulled.next_part() == part(b"ab")
        with pytest.raises(RemoteProtocolError, match=f"after {at} bytes"):
            unpulled.next_part()


def test_an_object_whose_last_bytes_came_with_the_end_can_still_be_pulled():
    decoder = LiteralDecoder()
    decoder.receive_data(b'{"PayloadPart":{"Bytes"')
    assert decoder.next_part() is NEED_DATA
    decoder.receive_data(b':"YWI="}}')
    decoder.receive_eof()
    assert [decoder.next_part(), decoder.next_part()] == [part(b"ab"), END]


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=300),
            st.sampled_from([None, *DataType]),
            st.sampled_from([None, *Completion]),
            st.text(max_size=20),
        ),
        max_size=5,
    ),
    st.integers(1, 400),
    st.sampled_from([Form.JSON_EVENTS, Form.LITERAL]),
)
@settings(max_examples=150)
def test_what_is_written_in_either_form_is_read_again(parts, size, form):
    encode = ENCODERS[form].part
    wire = b"".join(joined(encode(*p[:3], padding=p[3])) for p in parts)
    decoder = LiteralDecoder() if form is Form.LITERAL else PartDecoder()
    content_type = "" if form is Form.LITERAL else "application/json"
    assert told(decoder, [wire[at : at + size] for at in range(0, len(wire), size)]) == [
        *(part(p[0], p[1] or DataType.BINARY, p[2] or Completion.COMPLETE, content_type) for p in parts),
        END,
    ]
    if parts:
        assert decoder.form is form


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4), st.binary(max_size=300), st.integers(1, 60), st.booleans()
)
@settings(max_examples=200)
def test_whatever_else_an_object_holds_its_end_is_found(others, data, size, ascii_only):
    payload = {**others, "Bytes": base64.b64encode(data).decode()}
    for name in ("DataType", "CompletionState", "CompletionStatus", "P"):
        payload.pop(name, None)
    text = json.dumps({**others, "PayloadPart": payload}, ensure_ascii=ascii_only).encode()
    wire = text + text
    assert told(LiteralDecoder(), [wire[at : at + size] for at in range(0, len(wire), size)]) == [part(data)] * 2 + [END]


@given(
    st.one_of(
        st.binary(max_size=100),
        st.text(alphabet='{}[]"\\:, \nPa1', max_size=60).map(str.encode),
        st.tuples(st.integers(0, len(HARD) - 1), st.integers(1, 255)).map(
            lambda flip: HARD[: flip[0]] + bytes([HARD[flip[0]] ^ flip[1]]) + HARD[flip[0] + 1 :]
        ),
    ),
    st.integers(1, 100),
)
@settings(max_examples=400)
def test_garbage_is_judged_the_same_in_whatever_pieces_it_comes(garbage, size):
    whole = literal(garbage)
    pieces = told(LiteralDecoder(), [garbage[at : at + size] for at in range(0, len(garbage), size)])
    assert [p for p in whole if isinstance(p, PayloadPart)] == [p for p in pieces if isinstance(p, PayloadPart)]
    assert (whole[-1] is END) == (pieces[-1] is END)
    told(PartDecoder(), [event(garbage)])


# ---- memory and limits


def test_the_limit_of_a_literal_part_is_that_of_its_bytes():
    for size in (0, 1, 3000, 100_001):
        wire = joined(encode_literal_part(bytes(size)))
        assert literal(wire, max_part=size) == [part(bytes(size)), END]
        if size:
            assert literal(wire, max_part=size - 1) == [f"PayloadPart with {size} Bytes, the limit of a part is {size - 1}"]


BESIDE = f"with more than {HEADROOM} bytes beside the base64 of Bytes"


def cuts(wire):
    """The wire whole, and in pieces of some sizes."""
    return ([wire[at : at + size] for at in range(0, len(wire), size)] for size in (len(wire), 1000, 777))


@pytest.mark.parametrize("size", [0, 1, 150, 151, 300, 100_000, 400_000])
@pytest.mark.parametrize("before", [True, False])
def test_beside_the_base64_of_a_part_there_may_be_64_kib_to_the_byte(size, before):
    data, encoded = bytes(size), base64.b64encode(bytes(size)).decode()
    free = len(encoded) if len(encoded) > 200 else 0  # a short one is not told from what stands around it

    for wrong in (0, 1):
        names = len('{"PayloadPart":{"Bytes":"","P":"","x":""}}')
        spare = HEADROOM - names - (len(encoded) - free) + wrong
        members = [f'"Bytes":"{encoded}"', f'"P":"{"p" * (spare // 2)}","x":"{"x" * (spare - spare // 2)}"']
        text = ('{"PayloadPart":{' + ",".join(members if before else members[::-1]) + "}}").encode()
        assert len(text) == HEADROOM + free + wrong
        for pieces in cuts(text):
            assert told(LiteralDecoder(), pieces) == ([f"literal object {BESIDE}"] if wrong else [part(data), END])
        for around in (b"%b", b"\xef\xbb\xbf%b"):
            result = told(PartDecoder(), [event(around % text)])
            assert result == ([f"payload of a JSON event {BESIDE}"] if wrong else [json_part(data), END])
        (error,) = told(PartDecoder(), [event(text + b" " * (1 - wrong))])
        assert error == f"payload of a JSON event {BESIDE}"


def test_the_limit_of_a_literal_object_comes_before_it_is_decoded():
    for max_part, encoded in ((300, 400), (3000, 4000)):
        largest = encoded + HEADROOM
        wire = b'{"PayloadPart":{"Bytes":"' + b"!" * (largest + 1)
        for pieces in cuts(wire):
            (error,) = told(LiteralDecoder(max_part), pieces)
            assert error.startswith(f"literal object of more than {largest} bytes: a part has at most {max_part},")


LONG = b"A" * 100_000
TOO_MUCH = [
    b'{"PayloadPart":{"Bytes":"","P":"%b"}}' % LONG,
    b'{"PayloadPart":{"Bytes":"","x":"%b"}}' % LONG,
    b'{"PayloadPart":{"Bytes":""},"x":"%b"}' % LONG,
    b'{"PayloadPart":{"Bytes":""},"x":{"Bytes":"%b"}}' % LONG,
    b'{"PayloadPart":{"x":{"Bytes":"%b"},"Bytes":""}}' % LONG,
    b'{"PayloadPart":[{"Bytes":"%b"}]}' % LONG,
    b'{"PayloadPart":{"Bytes":"%b","Bytes":"%b"}}' % (LONG, LONG),
    b'{"PayloadPart":{"Bytes":"%b"},"PayloadPart":{"Bytes":"%b"}}' % (LONG, LONG),
    b'{"PayloadPart":{"x\\"Bytes":"%b","Bytes":""}}' % LONG,
    b'{"x\\"PayloadPart":{"Bytes":"%b"},"PayloadPart":{"Bytes":""}}' % LONG,
    b'{"PayloadPart":{"\\u0042ytes":"%b"}}' % LONG,
    b'{"PayloadPart":{"Bytes" "%b"}}' % LONG,
    b'{"Bytes":"%b","PayloadPart":{"Bytes":"%b"}}' % (LONG, LONG),
    b'{"PayloadPart":{"Bytes":"%b%b"}}' % (LONG, b"\\/" * 70_000),
    b'{"PayloadPart":{"Bytes":"%b","P":"%b"}}' % (LONG, b'\\"' * 40_000),
    b'{"PayloadPart":{"Bytes":"%b","x":[%b1]}}' % (LONG, b"1," * 40_000),
    b'{"PayloadPart":{"Bytes":"%b",%b"x":1}}' % (LONG, b" " * 70_000),
    b"{" + b" " * 70_000,
    b'{"' + LONG,
]


@pytest.mark.parametrize("wire", TOO_MUCH, ids=lambda wire: repr(wire[:50]))
def test_whatever_is_long_and_not_the_base64_of_the_part_is_refused_before_it_is_read(wire, monkeypatch):
    monkeypatch.setattr(bidi_json, "_decode", None)
    for pieces in cuts(wire):
        assert told(LiteralDecoder(), pieces) == [f"literal object {BESIDE}"]
    if wire.endswith(b"}"):
        assert told(PartDecoder(), [event(wire)]) == [f"payload of a JSON event {BESIDE}"]


def test_too_much_is_found_as_it_comes():
    decoder = LiteralDecoder()
    decoder.receive_data(b'{"PayloadPart":{"Bytes":"%b","P":"' % LONG)
    assert decoder.next_part() is NEED_DATA
    decoder.receive_data(b"x" * (HEADROOM - len('{"PayloadPart":{"Bytes":"","P":"')))
    assert decoder.next_part() is NEED_DATA
    decoder.receive_data(b"x")
    with pytest.raises(RemoteProtocolError, match="beside the base64"):
        decoder.next_part()


def test_the_bytes_beside_a_payload_part_are_not_its_own():
    text = b'{"Bytes":"%b","PayloadPart":{"Bytes":""}}' % LONG
    assert told(PartDecoder(), [event(text)]) == [f"payload of a JSON event {BESIDE}"]
    assert literal(text) == [f"literal object {BESIDE}"]
    assert told(PartDecoder(), [event(text.replace(LONG, b"AAAA" * 1500))]) == [f"payload of a JSON event {BESIDE}"]


def test_an_object_may_hold_2048_arrays_and_objects():
    for opening, closing in ((b"[", b"]"), (b'{"y":', b"}")):
        for count in (MAX_VALUES, MAX_VALUES + 1):
            inner = b",".join([opening + b"1" + closing] * (count - 3))
            text = b'{"PayloadPart":{"Bytes":"%b","x":[%b]}}' % (b"A" * 3000, inner)
            if count == MAX_VALUES:
                assert literal(text) == [part(bytes(2250)), END]
                assert told(PartDecoder(), [event(text)]) == [json_part(bytes(2250)), END]
            else:
                for pieces in cuts(text):
                    assert told(LiteralDecoder(), pieces) == ["literal object with more than 2048 arrays and objects"]
                (error,) = told(PartDecoder(), [event(text)])
                assert error == "payload of a JSON event with more than 2048 arrays and objects"


def test_numbers_that_nobody_asked_for_are_not_converted():
    # One takes 10 us to convert, and no double holds 1e999 or the last. All are valid JSON.
    for number in (b"1.7976931348623157e308", b"1e999", b"-0.0", b"1" * 400):
        assert literal(b'{"PayloadPart":{"Bytes":"aGk=","x":[%b,1]}}' % number) == [part(b"hi"), END]


@pytest.mark.parametrize("size", [70_000, 262_143, 262_145, 400_000, 1_000_001])
def test_a_long_part_is_the_same_whatever_stands_around_its_base64(size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    encoded = base64.b64encode(data)
    for text in (
        b'{"PayloadPart":{"Bytes":"%b"}}',
        b'{ "x" : {"Bytes":"aGk="}, "PayloadPart" \n:\t{ "P":"\\"Bytes", "Bytes" : "%b" ,"x":[{"Bytes":null}]} }',
        b'{"Bytes":7,"PayloadPart":{"x":["]"],"Bytes":"%b","P":"}"}}',
    ):
        for pieces in cuts(text % encoded):
            assert told(LiteralDecoder(), pieces) == [part(data), END]
        if b"7" not in text:
            assert told(PartDecoder(), [event(text % encoded)]) == [json_part(data), END]
    assert told(PartDecoder(), [event(b'\xef\xbb\xbf\n{"P":"x","Bytes":"%b"}\n' % encoded)]) == [json_part(data), END]


def test_escapes_in_base64_are_read_and_count_as_beside_it():
    data = b"\xff\xff\xff" * 100_000  # all slashes
    for escapes in (1, 1025, HEADROOM - 28):
        encoded = b"/" * (400_000 - escapes) + b"\\/" * escapes
        for pieces in cuts(b'{"PayloadPart":{"Bytes":"%b"}}' % encoded):
            assert told(LiteralDecoder(), pieces) == [part(data), END]
        assert told(PartDecoder(), [event(b'{"Bytes":"%b"}' % encoded)]) == [json_part(data), END]
    encoded = b"/" * 10 + b"\\/" * (HEADROOM - 27)
    assert literal(b'{"PayloadPart":{"Bytes":"%b"}}' % encoded) == [f"literal object {BESIDE}"]


@pytest.mark.parametrize("wrong", [b"=", b"==", b" ", b"-", b"\xff", b"\n", b"\\x", b"\\", b"AA=", b"A===", b"A"], ids=repr)
@pytest.mark.parametrize("place", [0, 131_068, 131_070, 131_072, 399_999, 400_000])
def test_long_base64_that_is_wrong_anywhere_is_refused(wrong, place):
    for size in (100_000, 400_000):
        text = b"A" * size
        encoded = text[:place] + wrong + text[place + len(wrong) if place + len(wrong) <= size else size :]
        if wrong in (b"=", b"==") and place + len(wrong) == size:
            continue  # is right
        if len(encoded) % 4 == 0 and wrong == b"A":
            continue
        for result in (
            literal(b'{"PayloadPart":{"Bytes":"%b"}}' % encoded),
            told(PartDecoder(), [event(b'{"Bytes":"%b"}' % encoded)]),
        ):
            assert len(result) == 1
            assert isinstance(result[0], str)


# ---- work that a caller may do in a thread


def test_work_is_told_when_a_large_message_is_whole_and_only_then():
    for wire, decoder in (
        (joined(encode_literal_part(bytes(300_000))), LiteralDecoder()),
        (joined(encode_json_event(bytes(300_000))), PartDecoder()),
        (sealed(joined(encode_json_event(bytes(300_000)))), PartDecoder()),
        (sealed(encode_request_event(bytes(400_000))), PartDecoder()),
        (encode_request_event(bytes(400_000)), PartDecoder()),
    ):
        end = len(wire) - (1 if isinstance(decoder, LiteralDecoder) else 0)  # its line's
        for piece in (10_000, 100_000, len(wire)):
            assert decoder.work == 0
            for at in range(0, len(wire), piece):
                decoder.receive_data(wire[at : at + piece])
                whole = at + piece >= end
                assert decoder.work == decoder.work == (end if whole else 0)
                got = decoder.next_part()
                assert decoder.work == 0
                assert isinstance(got, PayloadPart) is whole
                if whole:
                    break
            assert decoder.next_part() is NEED_DATA


def test_short_messages_are_no_work_however_many_are_there():
    for wire, decoder in (
        (joined(encode_literal_part(bytes(1000))), LiteralDecoder()),
        (joined(encode_json_event(bytes(1000))), PartDecoder()),
        (sealed(encode_request_event(bytes(1000))), PartDecoder()),
    ):
        decoder.receive_data(wire * 500)
        for _ in range(500):
            assert decoder.work == 0
            assert decoder.next_part().data == bytes(1000)
        assert decoder.work == 0


def test_work_leaves_an_error_to_the_pull():
    for wire in (b'{"x":"' + bytes(300_000), b"x" + bytes(300_000), b"[" * 300_000):
        decoder = LiteralDecoder()
        decoder.receive_data(wire)
        assert decoder.work == 0
        with pytest.raises(RemoteProtocolError):
            decoder.next_part()
        assert (decoder.work, decoder.buffered) == (0, 0)
    decoder = PartDecoder()
    decoder.receive_data(b"x" * 300_000)
    assert decoder.work == 0
    with pytest.raises(RemoteProtocolError):
        decoder.next_part()


def test_an_object_may_be_nested_64_deep_and_no_deeper_whatever_opens():
    def holding(value):
        return literal('{"x":' + value + ',"PayloadPart":{"Bytes":""}}')

    complaint = "literal object is nested deeper than 64 arrays and objects"
    for opening, closing in (("[", "]"), ('{"y":', "}")):
        inner = "1"
        for _ in range(MAX_DEPTH - 1):
            inner = opening + inner + closing
        assert holding(inner) == [part(b""), END]
        assert holding(opening + inner + closing) == [complaint]
        assert literal('{"x":' + opening * MAX_DEPTH) == [complaint]
    assert holding('"' + "[{" * 100 + '"') == [part(b""), END]


def test_need_tells_what_an_object_under_way_may_take_before_it_does():
    wire = joined(encode_literal_part(bytes(600_000), DataType.UTF8))
    decoder = LiteralDecoder(600_000)
    largest = 800_000 + HEADROOM
    for at in range(0, len(wire) - 1, 10_000):
        assert not at or decoder.need >= decoder.buffered + min(10_000, decoder.buffered)
        decoder.receive_data(wire[at : at + 10_000])
        if at + 10_000 < len(wire) - 1:
            assert decoder.next_part() is NEED_DATA
            assert decoder.buffered == at + 10_000
            assert decoder.need == min(2 * decoder.buffered, largest)
    assert decoder.next_part() == part(bytes(600_000), DataType.UTF8)
    assert decoder.next_part() is NEED_DATA
    assert (decoder.need, decoder.buffered) == (0, 0)


def test_a_large_object_takes_little_more_memory_than_it_tells_of():
    wire = joined(encode_literal_part(bytes(3_000_000)))
    view = memoryview(wire)
    decoder = LiteralDecoder()
    tracemalloc.start()
    for at in range(0, len(wire), 16_384):
        decoder.receive_data(view[at : at + 16_384])
        got = decoder.next_part()
        if at == 3_932_160:
            assert tracemalloc.get_traced_memory()[0] < 1.2 * decoder.buffered
            tracemalloc.reset_peak()
    assert tracemalloc.get_traced_memory()[1] < 1.2 * len(wire) + 3_000_000
    assert tracemalloc.get_traced_memory()[0] < 3_010_000
    tracemalloc.stop()
    assert len(got.data) == 3_000_000


def test_objects_in_one_piece_leave_their_neighbours_where_they_are():
    wire = joined(encode_literal_part(b"x")) * 40
    decoder = LiteralDecoder()
    decoder.receive_data(wire)
    for left in range(39, -1, -1):
        assert decoder.next_part() == part(b"x")
        assert decoder.buffered == 1 + left * len(wire) // 40
        assert decoder._buffer is wire
    assert decoder.next_part() is NEED_DATA
    assert (decoder._buffer, decoder.buffered) == (b"", 0)
    decoder.receive_data(wire[:5])
    assert decoder.next_part() is NEED_DATA
    decoder.receive_data(wire[5:])
    held = decoder._buffer
    for _ in range(39):
        assert decoder.next_part() == part(b"x")
        assert decoder._buffer is held
        assert len(held) == decoder.buffered


@pytest.mark.parametrize("filling", [b'\\"', b"x", b'","', b"[],", b"\\\\", b"{},"], ids=repr)
def test_each_byte_is_looked_at_once_in_whatever_pieces_it_comes(filling, monkeypatch):
    looks = []

    class Counting:
        """The pattern, noting how far it went."""

        def __init__(self, pattern):
            self.pattern = pattern

        def match(self, buffer, pos, end):
            match = self.pattern.match(buffer, pos, end)
            looks.append(match.end() - pos)
            return match

    def leave_string(buffer, pos, leave=bidi_json._leave_string):
        found = leave(buffer, pos)
        looks.append(found[0] - pos)
        return found

    monkeypatch.setattr(bidi_json, "_PLAIN", Counting(bidi_json._PLAIN))
    monkeypatch.setattr(bidi_json, "_leave_string", leave_string)
    wire = b'{"PayloadPart":{"Bytes":""},"x":["' + filling * 1000
    for step in (1, 7, 500):
        looks.clear()
        decoder = LiteralDecoder()
        for at in range(0, len(wire), step):
            decoder.receive_data(wire[at : at + step])
            assert decoder.next_part() is NEED_DATA
        assert sum(looks) <= len(wire)


@pytest.mark.parametrize("filling", [b'\\"', b"\\\\", b"x\\n", b"x" * 100 + b"\\/"], ids=repr)
def test_a_string_full_of_escapes_is_left_in_few_steps(filling):
    text = filling * 5000 + b'"'
    for kind in (bytes, bytearray, memoryview):
        for wire, left in ((kind(text), False), (kind(text[:-1]), True)):
            pos, steps, in_string = 0, 0, True
            while in_string and pos < len(wire):
                before = pos
                pos, in_string = bidi_json._leave_string(wire, pos)
                assert pos > before
                steps += 1
            assert (pos, in_string) == (len(wire), left)
            assert steps <= len(wire) // 2**16 + 2


# ---- answers


def test_a_literal_part_is_one_line():
    assert encode_literal_part(b"hi", DataType.UTF8, Completion.PARTIAL, padding='\n"') == [
        b'{"PayloadPart":{"Bytes":"aGk=","DataType":"UTF8","CompletionState":"PARTIAL","P":"\\n\\""}}\n'
    ]
    assert encode_literal_part(b"", completion=None) == [b'{"PayloadPart":{"Bytes":""}}\n']
    assert encode_literal_part(memoryview(b"hi\0\0").cast("H"), DataType.BINARY) == [
        b'{"PayloadPart":{"Bytes":"aGkAAA==","DataType":"BINARY","CompletionState":"COMPLETE"}}\n'
    ]
    assert joined(encode_literal_part(b"", padding="\ud800")).endswith(b',"P":"?"}}\n')


def test_a_large_literal_part_is_not_joined_and_has_at_most_16_mib():
    for size, pieces in ((16_383, 1), (16_384, 5)):
        buffers = encode_literal_part(bytes(size))
        assert len(buffers) == pieces
        assert json.loads(joined(buffers))["PayloadPart"]["Bytes"] == base64.b64encode(bytes(size)).decode()
    largest = encode_literal_part(bytes(MIB_16))
    decoder = LiteralDecoder()
    for buffer in largest:
        decoder.receive_data(buffer)
        got = decoder.next_part()
    assert got is NEED_DATA or got.data == bytes(MIB_16)
    with pytest.raises(LocalProtocolError, match="at most 16777216 bytes, not 16777217"):
        encode_literal_part(bytes(MIB_16 + 1))


def test_a_json_event_has_at_most_16_mib_with_its_base64():
    names = len('{"Bytes":"","CompletionState":"COMPLETE"}')
    largest = (MIB_16 - names) // 4 * 3
    assert len(joined(encode_json_event(bytes(largest)))) <= MIB_16 + 100
    with pytest.raises(LocalProtocolError, match="an event-stream payload has at most 16777216 bytes"):
        encode_json_event(bytes(largest + 3))


def test_failures_are_lines_with_the_seed_s_members():
    assert joined(encode_literal_model_stream_error("gone", "StreamBroken")) == (
        b'{"ModelStreamError":{"Message":"gone","ErrorCode":"StreamBroken"}}\n'
    )
    assert joined(encode_literal_model_stream_error("")) == b'{"ModelStreamError":{"Message":""}}\n'
    assert joined(encode_literal_internal_stream_failure("line\nline")) == (
        b'{"InternalStreamFailure":{"Message":"line\\nline"}}\n'
    )
    for encode in (encode_literal_model_stream_error, encode_literal_internal_stream_failure):
        line = joined(encode("\ud800" + "x" * 100_000))
        assert len(line) < 33_000
        assert line.count(b"\n") == 1


def test_each_form_is_answered_in_kind():
    for form in Form:
        encoder = ENCODERS[form]
        wire = joined(encoder.part(b"hi", DataType.UTF8, padding="x"))
        failures = joined(encoder.model_stream_error("m", "c")), joined(encoder.internal_stream_failure("i"))
        if form is Form.LITERAL:
            assert [json.loads(line) for line in (wire, *failures)] == [
                {"PayloadPart": {"Bytes": "aGk=", "DataType": "UTF8", "CompletionState": "COMPLETE", "P": "x"}},
                {"ModelStreamError": {"Message": "m", "ErrorCode": "c"}},
                {"InternalStreamFailure": {"Message": "i"}},
            ]
            continue
        for failure, name in zip(failures, ("ModelStreamError", "InternalStreamFailure"), strict=True):
            decoder = ResponseDecoder()
            decoder.receive_data(wire + failure)
            assert decoder.next_event().data == b"hi"
            assert decoder.form is form
            assert decoder.next_event().exception_type == name


def test_the_example_of_the_reference_page_does_what_it_says():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "bidi.md").read_text()
    example = {}
    exec(page.split("```python\n")[2].split("```")[0], example)
    assert json.loads(joined(example["reply"]))["PayloadPart"] == {
        "Bytes": base64.b64encode(b"HELLO").decode(),
        "DataType": "UTF8",
        "CompletionState": "COMPLETE",
        "P": "xxxxxxx",
    }
