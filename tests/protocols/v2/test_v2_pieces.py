"""A v2 request that is read as its body arrives: the same checks, the same tensors, in rows, and bounds on what is held."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import v2
from protocols.events import NEED_DATA
from protocols.v2.streamed_request import PieceReader, V2Piece
from protocols.v2.tensors import V2Tensor

ANY = v2.ModelSignature(name="m")
X = np.arange(40, dtype=np.int32).reshape(10, 4)


def body_of(*inputs: V2Tensor, json_inputs: tuple[dict[str, Any], ...] = (), **members: Any) -> tuple[bytes, int]:
    """A body and the length of its JSON."""
    _, (text, *data) = v2.encode_infer_request(inputs)
    head = json.loads(bytes(text))
    head["inputs"] = [*head["inputs"], *json_inputs]
    text = json.dumps({**head, **members}).encode()
    return text + b"".join(data), len(text)


def tensor(name: str, array: Any, datatype: str = "INT32") -> V2Tensor:
    return V2Tensor(name=name, datatype=datatype, array=array)


def strings(*rows: Any) -> Any:
    return np.array(rows, object)


def array_of(found: V2Tensor) -> Any:
    return found.elements


def pieces_in(body: bytes, header_length: int, cuts: list[int] | None = None, **options: Any) -> list[V2Piece]:
    """The pieces that a reader finds in a body, whole or cut at these places."""
    length = options.pop("length", len(body))
    reader = PieceReader(header_length, length, options.pop("signature", ANY), **options)
    ends = [0, *(cuts or []), len(body)]
    feed = [body[a:b] for a, b in itertools.pairwise(ends) if a < b]
    found: list[V2Piece] = []
    known = False
    while True:
        step = reader.next_piece() if known else reader.head()
        if isinstance(step, v2.V2Request):
            known = True
        elif isinstance(step, V2Piece):
            found.append(step)
            if step.last:
                return found
        elif feed:
            reader.receive_data(feed.pop(0))
        else:
            reader.receive_eof()


def joined(pieces: list[V2Piece]) -> dict[str, Any]:
    """The whole inputs again; each piece says of what it is a part."""
    rows: dict[str, list[Any]] = {}
    whole: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        for found, shape in zip(piece.inputs, piece.whole, strict=True):
            rows.setdefault(found.name, []).append(array_of(found))
            whole[found.name] = shape
            assert not array_of(found).flags.writeable
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for name, parts in rows.items():
        assert (len(parts) > 1) == bool(whole[name])
        if len(parts) > 1:
            assert whole[name] == (sum(len(part) for part in parts), *parts[0].shape[1:])
    return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in rows.items()}


def test_the_rows_of_an_input_come_in_pieces_of_at_most_so_many_bytes() -> None:
    pieces = pieces_in(*body_of(tensor("x", X)), piece=50)
    assert [piece.inputs[0].array.shape for piece in pieces] == [(3, 4)] * 3 + [(1, 4)]
    assert {piece.whole for piece in pieces} == {((10, 4),)}
    assert joined(pieces)["x"].tolist() == X.tolist()


def test_a_row_that_is_larger_than_a_piece_comes_whole() -> None:
    pieces = pieces_in(*body_of(tensor("x", X)), piece=10)
    assert [piece.inputs[0].array.shape for piece in pieces] == [(1, 4)] * 10


def test_rows_in_one_buffer_are_views_of_it() -> None:
    body, header_length = body_of(tensor("x", X))
    (piece,) = pieces_in(body, header_length)
    assert piece.whole == ((),)
    assert np.shares_memory(array_of(piece.inputs[0]), np.frombuffer(body, np.uint8))


def test_inputs_follow_each_other_and_those_without_bytes_are_whole_in_the_first_piece() -> None:
    body, header_length = body_of(
        tensor("x", X),
        tensor("empty", np.zeros((3, 0), np.int32)),
        tensor("scalar", np.array(7, np.int32)),
        tensor("words", strings(b"a", b"", b"ccc"), "BYTES"),
        json_inputs=({"name": "j", "shape": [2], "datatype": "FP32", "data": [1, 2]},),
        id="7",
        parameters={"a": 1, "binary_data_output": True},
        outputs=[{"name": "y"}],
    )
    reader = PieceReader(header_length, len(body), ANY)
    reader.receive_data(body)
    request = reader.head()
    assert isinstance(request, v2.V2Request)
    assert (request.id, request.parameters, request.binary_default, request.inputs) == ("7", {"a": 1}, True, ())
    assert [output.name for output in request.outputs] == ["y"]
    pieces = pieces_in(body, header_length)
    assert [[found.name for found in piece.inputs] for piece in pieces] == [["empty", "j", "x"], ["scalar"], ["words"]]
    found = joined(pieces)
    assert (found["empty"].shape, found["scalar"].shape, int(found["scalar"])) == ((3, 0), (), 7)
    assert found["words"].tolist() == [b"a", b"", b"ccc"]
    assert found["j"].tolist() == [1, 2]


def test_a_request_without_a_binary_byte_is_one_piece() -> None:
    body, header_length = body_of(json_inputs=({"name": "j", "shape": [1], "datatype": "FP32", "data": [1]},))
    (piece,) = pieces_in(body, header_length)
    assert (piece.last, joined([piece])["j"].tolist()) == (True, [1])


MIXED = body_of(
    tensor("x", X),
    tensor("words", strings([b"a", b"bb"], [b"", b"d" * 30], [b"e", b"f"]), "BYTES"),
    tensor("y", np.array([1, 2, 3], np.float64), "FP64"),
)


def check_mixed(pieces: list[V2Piece]) -> None:
    found = joined(pieces)
    assert found["x"].tolist() == X.tolist()
    assert found["words"].tolist() == [[b"a", b"bb"], [b"", b"d" * 30], [b"e", b"f"]]
    assert found["y"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [len(MIXED[0]), None])
def test_the_inputs_are_the_same_whatever_pieces_the_body_comes_in(length: int | None) -> None:
    body, header_length = MIXED
    for at in range(1, len(body)):
        check_mixed(pieces_in(body, header_length, [at], length=length, piece=20))
    check_mixed(pieces_in(body, header_length, list(range(1, len(body))), length=length))


@settings(max_examples=100)
@given(cuts=st.lists(st.integers(1, len(MIXED[0]) - 1), unique=True), piece=st.integers(1, 200))
def test_any_cuts_and_any_size_of_pieces_give_the_same(cuts: list[int], piece: int) -> None:
    check_mixed(pieces_in(*MIXED, sorted(cuts), piece=piece))


@pytest.mark.parametrize(("datatype", "array"), [
    ("BOOL", np.array([[0, 2], [1, 0]], np.uint8).view(np.bool_)),
    ("FP16", np.array([1, 2], np.float16)),
    ("BYTES", strings([], []).reshape(2, 0)),
    ("BYTES", np.array(b"one", object)),
    ("UINT8", np.arange(24, dtype=np.uint8).reshape(2, 3, 4)),
    ("INT64", np.zeros((0, 5), np.int64)),
])  # fmt: skip
def test_what_comes_in_pieces_is_what_comes_whole(datatype: str, array: Any) -> None:
    body, header_length = body_of(tensor("x", array, datatype))
    whole = v2.parse_infer(body, header_length, ANY).inputs[0]
    found = joined(pieces_in(body, header_length, list(range(1, len(body)))))["x"]
    assert (found.shape, found.dtype) == (whole.array.shape, whole.array.dtype)
    assert found.tolist() == array_of(whole).tolist()


DECLARED = v2.ModelSignature(
    name="m", inputs=(v2.TensorSpec(name="x", datatype="INT32", shape=(-1, 4)),), outputs=(v2.TensorSpec(
        name="y", datatype="INT32", shape=(-1,)),)
)  # fmt: skip
BINARY = {"name": "x", "shape": [10, 4], "datatype": "INT32", "parameters": {"binary_data_size": 160}}


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{**BINARY, "shape": [10, 5]}]},
        {"inputs": [{**BINARY, "shape": [2**40, 2**40]}]},
        {"inputs": [{**BINARY, "shape": [0, 2**62, 2**62], "parameters": {"binary_data_size": 0}}]},
        {"inputs": [{**BINARY, "shape": [-1, 4]}]},
        {"inputs": [{**BINARY, "datatype": "INT16"}]},
        {"inputs": [{**BINARY, "datatype": "FP32"}]},
        {"inputs": [{**BINARY, "name": "z"}]},
        {"inputs": [BINARY, BINARY]},
        {"inputs": [{**BINARY, "data": [1]}]},
        {"inputs": [{**BINARY, "parameters": {"binary_data_size": -1}}]},
        {"inputs": [{**BINARY, "parameters": {"binary_data_size": 2**63}}]},
        {"inputs": [{**BINARY, "parameters": {"binary_data_size": "160"}}]},
        {"inputs": []},
        {"inputs": 3},
        {"outputs": [{"name": "nope"}]},
        {"parameters": {"triton_x": 1}},
        {"parameters": {"a": []}},
        {"parameters": {"binary_data_output": 1}},
        {"id": 7},
    ],
)
def test_what_the_whole_reader_refuses_is_refused_at_the_head_in_the_same_words(change: dict[str, Any]) -> None:
    text = json.dumps({"inputs": [BINARY], **change}).encode()
    body = text + X.tobytes()
    with pytest.raises(v2.V2Error) as whole:
        v2.parse_infer(body, len(text), DECLARED)
    reader = PieceReader(len(text), len(body), DECLARED)
    reader.receive_data(text)
    with pytest.raises(v2.V2Error) as in_pieces:
        reader.head()
    assert (in_pieces.value.message, in_pieces.value.status) == (whole.value.message, whole.value.status)


@pytest.mark.parametrize("text", [b"{", b"[]", b'"\xff"', b"[" * 100, b'{"id":"a","id":"b"}'])
def test_json_that_is_wrong_is_refused(text: bytes) -> None:
    reader = PieceReader(len(text), None, ANY)
    reader.receive_data(text)
    with pytest.raises(v2.V2Error):
        reader.head()


@pytest.mark.parametrize(("header_length", "length", "status"), [(11, 200, 413), (10, 9, 400), (10, 101, 413)])
def test_lengths_that_cannot_be_are_refused_before_a_byte(header_length: int, length: int, status: int) -> None:
    with pytest.raises(v2.V2Error) as refused:
        PieceReader(header_length, length, ANY, v2.V2Limits(json=10), largest=100)
    assert refused.value.status == status
    PieceReader(10, 100, ANY, v2.V2Limits(json=10), largest=100)


def test_a_body_of_unknown_length_is_bounded_by_what_its_json_says() -> None:
    body, header_length = body_of(tensor("x", X))
    assert pieces_in(body, header_length, length=None, largest=len(body))
    with pytest.raises(v2.V2Error, match=r"limits\.body") as refused:
        pieces_in(body, header_length, length=None, largest=len(body) - 1)
    assert refused.value.status == 413


@pytest.mark.parametrize("missing", [1, 15, 16, 17, 159, 160])
def test_a_body_that_ends_early_names_the_input_and_what_came(missing: int) -> None:
    body, header_length = body_of(tensor("x", X))
    for cuts in ([], [header_length], [len(body) - missing - 1]):
        with pytest.raises(v2.V2Error, match=f"input 'x': the body ended after {160 - missing} of its 160 bytes"):
            pieces_in(body[:-missing], header_length, cuts, length=None)


def test_a_body_that_ends_in_its_json_is_an_error() -> None:
    body, header_length = body_of(tensor("x", X))
    with pytest.raises(v2.V2Error, match="ended in the middle of its JSON"):
        pieces_in(body[: header_length - 1], header_length, length=None)


@pytest.mark.parametrize("cut", [[], [-1]])
def test_the_last_piece_is_given_when_nothing_follows_it(cut: list[int]) -> None:
    body, header_length = body_of(tensor("x", X))
    more = body + b"z"
    with pytest.raises(v2.V2Error, match="follow the last input"):
        pieces_in(more, header_length, [len(more) + c for c in cut], length=None)
    reader = PieceReader(header_length, None, ANY)
    reader.receive_data(body)
    reader.head()
    assert reader.next_piece() is NEED_DATA
    reader.receive_eof()
    assert isinstance(reader.next_piece(), V2Piece)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\4\0\0\0abcd\0\0\0", "is cut off"),
        (b"\x09\0\0\0abcd\0\0\0\0", "bytes, only"),
        (b"\0\0\0\0\0\0\0\0z", "bytes are left"),
        (b"\0\0\0\0\3\0\0\0ab", "bytes, only"),
        (b"\0\0\0", "each with a"),
    ],
)
def test_strings_with_bad_lengths_are_refused_whatever_pieces_they_come_in(data: bytes, text: str) -> None:
    entry = {"name": "s", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [entry]}).encode()
    body = head + data
    for cuts in ([], list(range(1, len(body)))):
        with pytest.raises(v2.V2Error, match=text) as refused:
            pieces_in(body, len(head), cuts)
        assert "'s'" in refused.value.message


def test_the_need_is_known_before_the_memory_is_taken() -> None:
    large = np.zeros((2, 100_000), np.uint8)
    body, header_length = body_of(tensor("x", large, "UINT8"))
    reader = PieceReader(header_length, len(body), ANY)
    reader.receive_data(body[: header_length + 10])
    reader.head()
    assert (reader.next_piece(), reader.need) == (NEED_DATA, 100_000)
    reader.receive_data(body[header_length + 10 : header_length + 100_020])
    assert isinstance(reader.next_piece(), V2Piece)
    assert (reader.next_piece(), reader.need) == (NEED_DATA, 100_000)

    word = strings(b"w" * 300_000)
    body, header_length = body_of(tensor("s", word, "BYTES"))
    reader = PieceReader(header_length, len(body), ANY)
    reader.receive_data(body[: header_length + 10])
    reader.head()
    assert (reader.next_piece(), reader.need) == (NEED_DATA, 0), "a length that is only announced takes nothing"
    reader.receive_data(body[header_length + 10 : header_length + 250_000])
    assert reader.next_piece() is NEED_DATA
    assert reader.need >= 2 * 250_000  # and its copy

    text = json.dumps({"inputs": [], "parameters": {"a": "b" * 100_000}}).encode()
    assert PieceReader(len(text), None, ANY).need == len(text)


def test_what_is_held_beside_a_piece_is_less_than_a_row_and_a_buffer() -> None:
    # every byte is given out with the buffer that completes its row
    body, header_length = body_of(tensor("x", X))
    reader = PieceReader(header_length, len(body), ANY)
    reader.receive_data(body[:header_length])
    reader.head()
    given_out = 0
    for at in range(header_length, len(body), 7):
        reader.receive_data(body[at : at + 7])
        if at + 7 >= len(body):
            reader.receive_eof()
        while isinstance(piece := reader.next_piece(), V2Piece):
            given_out += math.prod(piece.inputs[0].array.shape) * 4
            if piece.last:
                break
        assert min(at + 7, len(body)) - header_length - given_out < 16


@settings(max_examples=150)
@given(
    data=st.binary(max_size=40), shape=st.lists(st.integers(0, 4), max_size=3), rows=st.integers(0, 30), known=st.booleans()
)
def test_any_bytes_are_pieces_or_an_error_as_they_are_for_the_whole_reader(
    data: bytes, shape: list[int], rows: int, known: bool
) -> None:
    entry = {"name": "s", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": rows}}
    head = json.dumps({"inputs": [entry]}).encode()
    body = head + data
    try:
        whole = array_of(v2.parse_infer(body, len(head), ANY).inputs[0])
    except v2.V2Error:
        whole = None
    try:
        found = joined(pieces_in(body, len(head), list(range(len(head), len(body), 3)), length=len(body) if known else None))
    except v2.V2Error:
        assert whole is None
    else:
        assert whole is not None
        assert found["s"].tolist() == whole.tolist()
