"""The words of a refusal of odd JSON are true: they name what is odd, and the byte where it is, however long the text is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from protocols import v2
from protocols.aws.bidi_json import _decode as decode_event
from protocols.errors import RemoteProtocolError
from protocols.json import strict

NOT = "is not JSON: JSON is malformed"
CUT = f"{NOT}: unexpected end of escaped utf-16 surrogate pair"
OTHER = f"{NOT}: invalid utf-16 surrogate pair"
BEYOND = "cannot be read: Number out of range"

ODD: Mapping[str, tuple[bytes, str, int]] = {
    # name: (value, words of the refusal, the byte that it names, from the beginning of the value)
    "half an emoji at the end": (rb'"x\ud83d"', CUT, 8),
    "half an emoji, then two characters": (rb'"x\ud83dab"', CUT, 8),
    "half an emoji in the middle": (rb'"\ud83d and more text"', CUT, 7),
    "half an emoji, then another escape": (rb'"\ud83d\n"', CUT, 7),
    "half an emoji behind a backslash": (rb'"\\\ud83d"', CUT, 9),
    "the other half": (rb'"\ude00"', OTHER, 7),
    "two first halves": (rb'"\ud83d\ud83d"', OTHER, 13),
    "an escape of no digits": (rb'"\u12G4"', f"{NOT}: invalid character in unicode escape", 6),
    "a number too large": (b"1e400", f"{BEYOND}: 1e400", 0),
    "a number too small": (b"[1, -1e400]", f"{BEYOND}: -1e400", 4),
    "a long number too large": (b"1" * 350 + b".5", f"{BEYOND}: {'1' * 21}...", 0),
    "a number too large, also in a text": (b'["1e999", 11e999, 1e999]', f"{BEYOND}: 11e999", 10),
    "a number too large behind long integers": (
        b'["%b", %b, -%b, "\xc3\xa9", 1e999]' % (b"9" * 310, b"9" * 310, b"9" * 350),
        f"{BEYOND}: 1e999",
        986,
    ),
    "a number too large in front of what is none": (b"[1e400-1]", f"{BEYOND}: 1e400", 1),
    "the same number twice": (b'["1e999", 1e999]', f"{BEYOND}: 1e999", 10),
    "NaN": (b"NaN", f"{NOT}: invalid character", 0),
    "Infinity": (b"-Infinity", f"{NOT}: invalid character", 1),
    "a control character": (b'"a\nb"', f"{NOT}: invalid character", 2),
    "a NUL": (b'"a\0b"', f"{NOT}: invalid character", 2),
    "a comma too many": (b"[1,]", f"{NOT}: trailing comma in array", 3),
    "a comment": (b"[1/* one */]", f"{NOT}: expected ',' or ']'", 2),
    "a word of Python": (b"True", f"{NOT}: invalid character", 0),
    "a leading zero": (b"01", f"{NOT}: invalid number", 1),
    "a plus": (b"+1", f"{NOT}: invalid character", 0),
    "a bracket of the other kind": (b"[1}", f"{NOT}: expected ',' or ']'", 2),
}
LONG = [
    lambda odd: (b'{"a":', odd, b"}"),
    lambda odd: (b'{"p":"%b","a":' % (b"x" * 2000), odd, b"}"),
    lambda odd: (b'{"p":["%b"],"a":[' % ("é" * 2**20).encode(), odd, b"]}"),
    lambda odd: (b'{"p":[%b1],"a":' % (b"1," * 70_000), odd, b',"z":[%b1]}' % (b"1," * 70_000)),
    lambda odd: (strict.BOM + b'{"a":', odd, b',"b":"behind it"}'),
]  # fmt: skip


def read(text: bytes) -> Any:
    return strict.loads(text, what="the body")


def read_with_nan(text: bytes) -> Any:
    return strict.loads(b'{"n":NaN,' + text.removeprefix(strict.BOM)[1:], what="the body", allow_nonfinite=True)


def read_without_duplicates(text: bytes) -> Any:
    return strict.loads(text, what="the body", duplicates=False)


READERS: Mapping[str, tuple[Callable[[bytes], Any], int]] = {
    # name: (reader, by how much it moves the text)
    "any": (read, 0), "with NaN": (read_with_nan, len(b'"n":NaN,')), "without duplicates": (read_without_duplicates, 0),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("around", range(len(LONG)))
@pytest.mark.parametrize("what", ODD)
def test_a_refusal_names_what_is_odd_and_its_byte(what: str, around: int, reader: str) -> None:
    odd, words, at = ODD[what]
    if reader == "with NaN" and what in ("NaN", "Infinity"):
        return
    before, odd, behind = LONG[around](odd)
    text, (call, moved) = before + odd + behind, READERS[reader]
    moved -= len(strict.BOM) if reader == "with NaN" and text.startswith(strict.BOM) else 0
    with pytest.raises(strict.JSONError) as refused:
        call(text)
    said = refused.value.message
    assert said.startswith(f"the body {words}"), said
    assert said.endswith(f"(byte {len(before) + at + moved})"), said


@pytest.mark.parametrize("text", [
    rb'{"a":"\ud83d', rb'{"a":"\ud83d\u', rb'{"a":"\ud83d\udE0', rb'{"a":"\ud8', b'{"a":"x', b'{"a":[1,2', b'{"a":tru', b'"',
])  # fmt: skip
def test_a_text_that_is_cut_off_is_truncated(text: bytes) -> None:
    with pytest.raises(strict.JSONError, match=r"^body is not JSON: Input data was truncated$"):
        strict.loads(text)


@pytest.mark.parametrize(
    "text", [rb'"\ud83d\ude00"', rb'"\\ud83d"', rb'"a\\\\ud83d"', b"1e308", b'"1e400"', b"-0", b"9" * 400]
)
def test_what_looks_like_it_and_is_none_is_read(text: bytes) -> None:
    strict.loads(text)


# -- the same text behind other readers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [b"1", b"9" * 18])
def test_a_number_too_large_among_many_is_found_without_a_call_of_python_for_each(
    integer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "_STEADY", None)
    text = b"[%b,%b1e999]" % (integer, b"1e3," * 16_000)
    with pytest.raises(strict.JSONError, match=rf"Number out of range: 1e999 \(byte {len(text) - 6}\)"):
        strict.loads(text)


@pytest.mark.parametrize("count", [1, 5_000, pytest.param(1_100_000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("place", ["first", "last", "behind"])
@pytest.mark.parametrize("odd", [b"1e400", b"01", b"1/* one */"])
def test_so_does_one_of_numbers_in_a_request_of_any_length(odd: bytes, place: str, count: int) -> None:
    numbers = [b"1"] * count
    if place != "behind":
        numbers[0 if place == "first" else -1] = odd
    head = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[%d],"data":[' % count
    text = b'%b%b]}],"parameters":{"p":%b}}' % (head, b",".join(numbers), odd if place == "behind" else b"1")
    at = text.index(odd) + {b"1e400": 0, b"01": 1}.get(odd, 1)
    codec = v2.InferCodec(v2.ModelSignature(name="m", versions=("1",), platform="", inputs=None, outputs=None))
    for before in (b"", strict.BOM):
        with pytest.raises(v2.V2Error) as refused:
            codec.parse(before + text, None)
        assert refused.value.message.endswith(f"(byte {at + (len(before) if place == 'behind' or count < 10**6 else 0)})")
        assert ("Number out of range" in refused.value.message) is (odd == b"1e400")


def test_a_comma_too_many_among_a_million_numbers_is_one() -> None:
    head = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1100000],"data":['
    text = b"%b%b1,]}]}" % (head, b"1," * 1_099_999)
    codec = v2.InferCodec(v2.ModelSignature(name="m", versions=("1",), platform="", inputs=None, outputs=None))
    with pytest.raises(v2.V2Error, match=rf"data is not JSON: a comma without a value \(byte {len(text) - 5}\)$"):
        codec.parse(text, None)


@pytest.mark.parametrize("what", ["half an emoji at the end", "a comma too many"])
def test_so_do_json_events(what: str) -> None:
    odd, words, at = ODD[what]
    with pytest.raises(RemoteProtocolError) as refused:
        decode_event(msgspec.json.Decoder(), b'{"a":' + odd + b"}", "the event")
    assert str(refused.value).startswith(f"the event {words}")
    assert str(refused.value).endswith(f"(byte {5 + at})")
