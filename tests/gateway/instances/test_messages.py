"""Messages between a gateway and an instance: each arrives as it was, and an invalid one is a ValueError."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import models.messages as said_by_models
from gateway.codecs.formatting import JSONBounds
from gateway.instances import messages
from gateway.instances.memory import Block
from gateway.instances.messages import (
    Array,
    Ask,
    Asked,
    Cancel,
    Credit,
    Describe,
    Described,
    Ended,
    EndOfInput,
    Failed,
    Folder,
    Forget,
    Frames,
    Free,
    GivenInput,
    Head,
    Hello,
    Load,
    Loaded,
    Locate,
    Log,
    Message,
    Open,
    PartSaid,
    Ping,
    Pong,
    PromptTokens,
    ReadInput,
    Returned,
    Said,
    Stuck,
    Tensors,
    Text,
    Write,
    encoded,
    frames_of,
    item_of,
    message_of,
)
from models.errors import ModelError
from models.messages import (
    BytesTensor,
    ChatMessage,
    Finish,
    FinishReason,
    GenerationParameters,
    Image,
    InferRequest,
    InferResponse,
    Part,
    PartKind,
    Prompt,
    ResponseFormat,
    Sound,
    Tensor,
    Token,
    ToolCall,
    ToolSpec,
    TopToken,
)
from models.session import Call, ClientCertificate

CALL = Call(
    id="1", model="m", version="2", dialect="lmi", path="/p", query="a=b", headers={"a": "ü"}, parameters={"k": [1, None]},
    party="p", client_certificate=ClientCertificate(subject="CN=a", names=("DNS:a", "IP:1")),
)  # fmt: skip
EVERY: tuple[Message, ...] = (
    Hello("1.2"),
    Describe("m", "app:m", {"a": [1, {"b": None}]}),
    Describe("m", "", {}, Folder("/m", "m", True, 100)),
    Described({"capacity": 4}, True),
    Load(7),
    Load(7, 1.5, 2.0, 4),
    Loaded(None, True, False),
    Loaded(["a", "b"], False, True),
    Failed("ValueError: no", "trace"),
    Failed("", "", ended=True),
    Failed("no", "", configuration=True),
    Failed("no", "", refusal="BadModel"),
    Failed("no", "trace", memory=True),
    Ping(1),
    Pong(2**63),
    Ask(1, "chat_template", [{"role": "user", "content": "hi"}]),
    Returned(1, {"a": b"\xff"}, None),
    Returned(2, None, Ended(0, "raised", "no", trace="trace")),
    ReadInput(1, "id", b"\0\xff", {"a": "b"}, JSONBounds(8, 9, 10), "m", {"voice": "alto"}),
    GivenInput(1, "id", "x", {"n": [2]}, True),
    Write(2, 1, [Token(text="a", prefill=True), Token(text="b", finish=FinishReason.LENGTH)]),
    Forget(1),
    Locate(9, 3),
    Log("app", 20, "said\nmore", ""),
    Open(1, CALL, 2.5),
    Open(2**40, Call(), -1.0),
    Text(1, "token", 5, -0.25),
    Text(1, "", 0, None),
    Said(1, Token(text="a", special=True), None),
    Said(1, None, Finish(reason=FinishReason.LENGTH)),
    Asked(1, Prompt(text="a")),
    PartSaid(1, b"\0\xff", False, True),
    Tensors(1, [Array("a", "UINT8", (2,), b"ab", {"p": 1.5}, (4,))], "id", {"x": True}, ["out"], False),
    Tensors(1, [], "", {}, None, True),
    EndOfInput(1),
    Credit(1, 8, 2**31),
    Cancel(1),
    Head(1, {"content-type": "a/b"}, True),
    PromptTokens(1, None),
    PromptTokens(1, 3),
    Ended(1),
    Ended(1, lingers=True),
    Ended(1, "error", "no", "Code", 409),
    Ended(1, "context", tokens=(4, 2, None)),
    Stuck(1, True, "File", False),
    PartSaid(1, b"", False, True, Block(2**40, 1, 4096, 2**31)),
    Tensors(1, [Array("a", "UINT8", (2,), b"", {}, (), Block(1, 0, 0, 65536))], "", {}, None, True),
    Free([1, 2**40]),
)  # fmt: skip


def fed(data: bytes, splits: Iterable[int] = ()) -> list[Message]:
    """All messages of the bytes that come in these pieces."""
    frames, found, at = Frames(), list[Message](), 0
    for end in (*splits, len(data)):
        found += [message for each in frames.feed(data[at:end]) for message in each]
        at = end
    return found


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_there_is_an_example_of_each_message() -> None:
    assert {type(message) for message in EVERY} == set(Message.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("message", EVERY, ids=repr)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    (frame,) = frames_of([encoded(message)])
    assert fed(frame) == [message]


def test_many_messages_are_one_frame() -> None:
    (frame,) = frames_of([encoded(message) for message in EVERY])
    assert fed(frame) == list(EVERY)


def test_and_more_where_they_are_large() -> None:
    said = [PartSaid(1, bytes([n]) * n * 50_000, False, True) for n in range(12)]
    frames = list(frames_of([encoded(message) for message in said]))
    assert 3 < len(frames) < 12
    assert fed(b"".join(frames)) == said


def test_of_no_messages_there_is_no_frame() -> None:
    assert list(frames_of([])) == []


def test_frames_may_be_split_anywhere() -> None:
    data = b"".join(frame for message in EVERY[::3] for frame in frames_of([encoded(message), encoded(Ping(0))]))
    expected = fed(data)
    assert len(expected) == 2 * len(EVERY[::3])
    for split in range(len(data)):
        assert fed(data, [split]) == expected
    assert fed(data, range(1, len(data))) == expected


@given(st.lists(st.sampled_from(EVERY)), st.data())
def test_and_in_any_pieces(said: list[Message], data: st.DataObject) -> None:
    whole = b"".join(frame for message in said for frame in frames_of([encoded(message)]))
    assert fed(whole, sorted(data.draw(st.lists(st.integers(0, len(whole)))))) == said


def test_the_largest_message_may_come_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LARGEST", 1000)
    small = encoded(PartSaid(1, bytes(messages.BYTES_AHEAD - 12), False, True))
    large = encoded(PartSaid(1, bytes(1000 - 9), False, True))
    assert (len(small), len(large)) == (messages.BYTES_AHEAD - 1, 1000)
    (frame,) = frames_of([small, large])
    assert len(fed(frame)) == 2


# -- invalid messages ------------------------------------------------------------------------------------------------------


def refused(data: bytes) -> None:
    """ValueError, or messages: never another exception."""
    try:
        found = fed(data)
        for message in found:
            if isinstance(message, messages.ITEMS):
                message_of(message)
    except ValueError:
        pass


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_value_error(data: bytes) -> None:
    refused(data)
    refused(framed(data))
    refused(framed(b"\x91" + data))


@given(st.sampled_from(EVERY), st.data())
def test_so_is_a_message_with_a_byte_changed(message: Message, data: st.DataObject) -> None:
    changed = bytearray(b"\x91" + encoded(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused(framed(bytes(changed)))


@given(st.sampled_from(EVERY), st.data())
def test_so_is_one_that_is_cut_off(message: Message, data: st.DataObject) -> None:
    whole = b"\x91" + encoded(message)
    with pytest.raises(ValueError):
        fed(framed(whole[: data.draw(st.integers(0, len(whole) - 1))]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3),
    max_leaves=12,
)


@given(st.integers(0, 33), st.lists(VALUES, max_size=8))
def test_so_are_fields_of_any_types(tag: int, values: list[Any]) -> None:
    refused(framed(msgspec.msgpack.encode([[tag, *values]])))


SHAPES = st.lists(st.integers(-4, 9) | st.sampled_from([-(2**63), 2**31, 2**62, 2**64 - 1]), max_size=5) | st.just([1] * 70)


@given(st.sampled_from([*messages.DATATYPES, "", "FP128"]), SHAPES, st.binary(max_size=40))
@example("BYTES", [-1, -4], bytes(16))
@example("BYTES", [-1], b"")
@example("BOOL", [2**62, 0], b"")
@example("FP64", [2**62, 0], b"")
@example("UINT8", [1] * 65, b"a")
def test_so_are_tensors_of_any_shape(datatype: str, shape: list[int], data: bytes) -> None:
    item = Tensors(1, [Array("a", datatype, tuple(shape), data, {}, ())], "", {}, None, True)
    (found,) = fed(framed(b"\x91" + msgspec.msgpack.encode(item)))
    assert found == item
    try:
        response, size = message_of(item)
    except ValueError:
        return
    assert size == len(data)
    assert list(response.outputs[0].data.shape) == shape  # its elements can be had, too


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x94\x09\x01\xa1f\xdd\xff\xff\xff\xff",
        b"\x91\x94\x09\x01\xa1f\xdf\xff\xff\xff\xff",
        b"\x91\x95\x18\x01\xc6\xff\xff\xff\xff\xc2\xc2",
        b"\x91\x94\x09\x01\xa1f" + b"\x91" * 100_000 + b"\xc0",
        b"\x91\x94\x09\x01\xa1f" + b"\x81\x01" * 100_000 + b"\xc0",
        b"\x91\x94\x09\x01\xa1f\x81\x80\x01",
        b"\x91\x94\x09\x01\xa1\xff\xc0",
        b"\x91\x94\x09\x01\xa1f\xd7\xff" + b"\xff" * 8,
        b"\x90\x90",
        b"\x91\x92\x63\x01",
        b"\x91\x92\xa1a\x01",
        b"\x91\x92\x1a\xc3",
        b"\xc0",
    ],
)
def test_what_is_nothing_like_a_frame_of_messages_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        fed(framed(body))


def test_a_frame_that_is_too_long_is_one_at_its_length() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        fed(struct.pack(">I", 2**32 - 1))


@pytest.mark.parametrize("said", [Said(1, None, None), EndOfInput(1)])
def test_a_message_of_a_session_that_carries_none_is_one(said: Any) -> None:
    with pytest.raises(ValueError):
        message_of(said)


# -- messages of models ----------------------------------------------------------------------------------------------------


def crossed(message: Any) -> Any:
    """A model's message as it arrives. Both sides must count the same size for it."""
    item, size = item_of(3, message)
    (frame,) = frames_of([encoded(item)])
    (found,) = fed(frame)
    arrived, counted = message_of(found)  # type: ignore[arg-type]
    assert counted == size
    return arrived


TOP = (TopToken(text="a", id=2, log_prob=-1.5, special=True, data=b"\xff"), TopToken(text="b", log_prob=None))
TOKEN: dict[str, Any] = {
    "text": "ü", "id": 2**40, "log_prob": -0.5, "special": True, "prefill": True, "finish": FinishReason.STOP_SEQUENCE,
    "top": TOP, "sequence": 3, "prompt_tokens": 9, "stop": "\n", "data": b"\xc3",
    "thinking": True,
}  # fmt: skip
PARAMETERS: dict[str, Any] = {
    "do_sample": True, "seed": -5, "temperature": 0.5, "repetition_penalty": 1.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
    "typical_p": 0.75, "presence_penalty": 2.0, "frequency_penalty": -2.0, "logit_bias": {7: 1.5, 0: -100.0},
    "max_new_tokens": 99, "limited": False, "min_length": 2, "ignore_eos_token": True, "stop_sequences": ("a", "ü"), "stop_token_ids": (1, 2),
    "include_stop_str_in_output": False, "bad_sequences": ("x",), "n": 2, "best_of": 3, "num_beams": 4, "length_penalty": 0.5,
    "early_stopping": True, "truncate": 7, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "details": True, "return_full_text": True, "decoder_input_details": True, "top_n_tokens": 5, "logprobs": 2,
    "prompt_logprobs": 1, "extra": {"a": [1, {"b": None}], "c": 2**64 - 1, "d": -(2**63)},
}  # fmt: skip


def test_the_examples_have_every_field_and_no_default() -> None:
    for kind, values in ((Token, TOKEN), (GenerationParameters, PARAMETERS)):
        usual = kind(text="") if kind is Token else kind()
        assert {name for name in kind.__struct_fields__ if values[name] != getattr(usual, name)} == {*kind.__struct_fields__}


PIECE: dict[str, Any] = {
    "index": 2, "id": "call_1", "name": "weather", "arguments": '{"city": "Köln"', "sequence": 1, "tokens": 3, "text": "<call>",
    "finish": FinishReason.TOOL_CALLS, "prompt_tokens": 4,
}  # fmt: skip
PROMPT: dict[str, Any] = {
    "messages": (
        ChatMessage(role="user", content="see", parts=(said_by_models.Text(text="see"), Image(data=b"\x89", media_type="image/png"))),
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f"),), thinking="hm"),
        ChatMessage(role="tool", content="no", tool_call_id="1", is_error=True),
        ChatMessage(role="user", content="", name="Ann", parts=(Sound(data=b"RIFF", format="wav"),)),
    ),
    "tools": (ToolSpec(name="f", description="d", parameters={"type": "object"}, strict=True),),
    "tool_choice": "f", "parallel_tools": False, "effort": "low", "thinking": False, "thinking_budget": 9, "adapter": "a",
    "response_format": ResponseFormat(kind="json_schema", schema={"type": "string"}, name="s", strict=True),
    "template": {"x": [1]}, "prefill": True,
}  # fmt: skip


@pytest.mark.parametrize("field", PIECE)
def test_a_piece_of_a_call_arrives_with_each_of_its_fields(field: str) -> None:
    call = ToolCall(**{field: PIECE[field]})
    assert crossed(call) == call != ToolCall()


@pytest.mark.parametrize("field", PROMPT)
def test_a_prompt_arrives_with_everything_that_a_request_says(field: str) -> None:
    prompt = Prompt(**{"text": "t", field: PROMPT[field]})
    assert crossed(prompt) == prompt != Prompt(text="t")


def test_the_example_of_a_prompt_has_every_field() -> None:
    assert {"text", "parameters", *PROMPT} == {*Prompt.__struct_fields__}
    assert {*PIECE} == {*ToolCall.__struct_fields__}


@pytest.mark.parametrize("field", TOKEN)
def test_a_token_arrives_with_each_of_its_fields(field: str) -> None:
    token = Token(**{"text": "t", field: TOKEN[field]})
    assert crossed(token) == token


@pytest.mark.parametrize("field", PARAMETERS)
def test_a_prompt_arrives_with_each_of_its_parameters(field: str) -> None:
    prompt = Prompt(text="once", parameters=GenerationParameters(**{field: PARAMETERS[field]}))
    assert crossed(prompt) == prompt


@pytest.mark.parametrize(
    "message",
    [
        Token(**TOKEN),
        Token(text="", log_prob=None),
        Prompt(text="", parameters=GenerationParameters(**PARAMETERS)),
        Finish(reason=FinishReason.EOS_TOKEN),
        Finish(reason=FinishReason.STOP_SEQUENCE, sequence=2, prompt_tokens=4, stop="\n"),
        Part(data=b""),
        Part(data=b"\xff", kind=PartKind.UTF8, last=False),
    ],
    ids=lambda message: type(message).__name__,
)
def test_so_do_others(message: Any) -> None:
    assert crossed(message) == message


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(-(2**63), 2**64 - 1),
    st.none() | st.floats(allow_nan=False),
)
def test_any_token_does(text: str, id: int, log_prob: float | None) -> None:
    token = Token(text=text, id=id, log_prob=log_prob)
    assert crossed(token) == token


class Text_(str):
    """A text of a library's own."""


class Number(int):
    """A number of a library's own."""


@pytest.mark.parametrize(
    ("given", "arrived"),
    [
        (Token(text=np.str_("a"), id=np.int64(5), log_prob=np.float32(-0.5)), Token(text="a", id=5, log_prob=-0.5)),
        (Token(text=Text_("a"), id=Number(5), log_prob=-1), Token(text="a", id=5, log_prob=-1)),
        (Token(text="a", top=list(TOP)), Token(text="a", top=TOP)),  # type: ignore[arg-type]
        (Part(data=bytearray(b"ab"), last=1), Part(data=b"ab")),  # type: ignore[arg-type]
        (Part(data=memoryview(b"abcdef")[::2]), Part(data=b"ace")),
        (Part(data=memoryview(np.array([1, 2], "<u4"))), Part(data=b"\1\0\0\0\2\0\0\0")),
        (Prompt(text="a", parameters=GenerationParameters(extra=OrderedDict(a=(1,)))),
         Prompt(text="a", parameters=GenerationParameters(extra={"a": [1]}))),
    ],
)  # fmt: skip
def test_what_models_take_for_texts_numbers_and_bytes_arrives_as_such(given: Any, arrived: Any) -> None:
    assert crossed(given) == arrived


ARRAYS: dict[str, Any] = {
    "BOOL": np.array([True, False]), "UINT8": np.arange(3, dtype="u1"), "UINT16": np.arange(3, dtype="u2"),
    "UINT32": np.arange(3, dtype="u4"), "UINT64": np.array([2**64 - 1], "u8"), "INT8": np.array([-1], "i1"),
    "INT16": np.array([-2], "i2"), "INT32": np.array([-3], "i4"), "INT64": np.array([-(2**63)], "i8"),
    "FP16": np.array([0.5], "f2"), "FP32": np.array([[0.5, -0.0]], "f4"), "FP64": np.array([1e300], "f8"),
    "BF16": np.array([1.5, -2.0], ml_dtypes.bfloat16), "BYTES": np.array([b"", b"\xff", b"abc"], object),
}  # fmt: skip
ODD: dict[str, Any] = {
    "0-d": np.array(5), "0-d BYTES": np.array(b"a", object), "empty": np.zeros((0,)), "empty rows": np.zeros((3, 0, 2), "u1"),
    "empty BYTES": np.zeros((2, 0), object), "reversed": np.arange(6)[::-2], "columns": np.arange(6).reshape(2, 3).T,
    "big-endian": np.arange(3, dtype=">i4"), "text": np.array([["a", "ü"]]), "bytes": np.array([b"ab", b"c"]),
    "0-d BF16": np.array(1.5, ml_dtypes.bfloat16), "empty BF16": np.zeros((0, 2), ml_dtypes.bfloat16), "0-d BOOL": np.array(True),
    "many dimensions": np.zeros((1,) * 64), "scalar": np.float32(1.5),
}  # fmt: skip


def same(arrived: Any, array: Any, datatype: str) -> None:
    assert arrived.datatype == datatype
    assert arrived.shape == arrived.data.shape == array.shape
    if datatype == "BYTES":
        expected = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1)]
        assert list(arrived.data.reshape(-1)) == expected
    else:
        assert arrived.data.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(arrived.data, array)
    assert not arrived.data.flags.writeable


@pytest.mark.parametrize("name", [*ARRAYS, *ODD])
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    array = {**ARRAYS, **ODD}[name]
    tensor = Tensor(name="in", data=array, parameters={"p": 1, "q": "x", "r": True, "s": 0.5}, whole=(9, 9))
    request = InferRequest(inputs=[tensor], id="7", parameters={"sequence_id": 2**64 - 1}, outputs=("a", "b"), last=False)
    response = InferResponse(outputs=[tensor, tensor], id="8", parameters={"x": None})  # type: ignore[dict-item]
    asked, answered = crossed(request), crossed(response)
    assert (asked.id, asked.parameters, asked.outputs, asked.last) == ("7", {"sequence_id": 2**64 - 1}, ("a", "b"), False)
    assert (answered.id, answered.parameters, len(answered.outputs)) == ("8", {"x": None}, 2)
    for arrived in (*asked.inputs, *answered.outputs):
        assert (arrived.name, arrived.parameters, arrived.whole) == ("in", {"p": 1, "q": "x", "r": True, "s": 0.5}, (9, 9))
        same(arrived, array, tensor.datatype)


def test_a_tensor_of_bytes_that_nobody_has_looked_at_crosses_again_without_objects() -> None:
    once = crossed(InferRequest(inputs=[Tensor(name="x", data=ARRAYS["BYTES"])]))
    twice = crossed(InferResponse(outputs=once.inputs))
    assert type(twice.outputs[0]) is BytesTensor
    assert not once.inputs[0].given.made
    same(twice.outputs[0], ARRAYS["BYTES"], "BYTES")


def test_no_tensors_are_a_message_too() -> None:
    assert crossed(InferRequest(inputs=())).inputs == ()
    assert crossed(InferResponse(outputs=())).outputs == ()


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

UNSENDABLE: dict[str, Any] = {
    "an object of the model's": InferResponse(outputs=[], parameters={"a": object()}),  # type: ignore[dict-item]
    "a name that is no text": InferResponse(outputs=[], parameters={1: 2}),  # type: ignore[dict-item]
    "an id that is no text": InferResponse(outputs=[], id=5),  # type: ignore[arg-type]
    "an array of objects": InferResponse(outputs=[Tensor(name="a", data=np.array([{}, object()], object))]),
    "an array of numbers as BYTES": InferResponse(outputs=[Tensor(name="a", data=np.array([1]), datatype="BYTES")]),
    "an array of another type": InferResponse(outputs=[Tensor(name="a", data=np.zeros(1, "f8"), datatype="FP32")]),
    "a datatype that is none": InferResponse(outputs=[Tensor(name="a", data=np.zeros(1), datatype="FP128")]),
    "a masked array": InferResponse(outputs=[Tensor(name="a", data=np.ma.masked_array([1, 2], [0, 1]))]),
    "a parameter of a tensor's": InferResponse(outputs=[Tensor(name="a", data=np.zeros(1), parameters={2: 1})]),  # type: ignore[dict-item]
    "a last that is none": InferRequest(inputs=[], last="yes"),  # type: ignore[arg-type]
    "an id above 64 bits": Token(text="", id=2**64),
    "a text that is bytes": Token(text=b"a"),  # type: ignore[arg-type]
    "a text that is a list": Token(text=["a"]),  # type: ignore[arg-type]
    "no text": Token(text=None),  # type: ignore[arg-type]
    "an id that is a text": Token(text="", id="5"),  # type: ignore[arg-type]
    "an id that is a bool": Token(text="", id=True),
    "a log-probability that is a text": Token(text="", log_prob="-1"),  # type: ignore[arg-type]
    "a reason that is none": Finish(reason="boredom"),  # type: ignore[arg-type]
    "bytes that are a text": Token(text="", data="a"),  # type: ignore[arg-type]
    "a number above 64 bits": Prompt(text="", parameters=GenerationParameters(extra={"a": 2**70})),
    "a complex number": Prompt(text="", parameters=GenerationParameters(extra={"a": np.complex64(1)})),
    "a long double": Prompt(text="", parameters=GenerationParameters(extra={"a": np.longdouble(1)})),
    "what is nested too deeply": Prompt(text="", parameters=GenerationParameters(extra={"a": DEEP})),
    "a parameter of another type": Prompt(text="", parameters=GenerationParameters(top_k="5")),  # type: ignore[arg-type]
    "a part of text": Part(data="a"),  # type: ignore[arg-type]
    "a part of a number": Part(data=5),  # type: ignore[arg-type]
    "no message": "a",
    "nothing": None,
}


@pytest.mark.parametrize("message", UNSENDABLE.values(), ids=[*UNSENDABLE])
def test_what_cannot_be_sent_is_an_error_where_it_is(message: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError, ModelError)):
        encoded(item_of(1, message)[0])


@pytest.mark.parametrize(
    "message",
    [
        Head(1, {"a": 5}, False),  # type: ignore[dict-item]
        Returned(1, object(), None),
        Returned(1, {frozenset([(1, ("a",))]): {1: {2}}, "s": "\ud800"}, None),
        Ended(1, "error", "no", status="409"),  # type: ignore[arg-type]
        Ended(1, "context", tokens=(1.5, 2, None)),  # type: ignore[arg-type]
        PromptTokens(1, 2**70),
        PromptTokens(1, True),
    ],
)
def test_so_is_any_other_message(message: Message) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        encoded(message)


HALF, MARK = "a\ud800", "a\ufffd"


def test_half_of_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert crossed(Token(text=HALF, id=3)) == Token(text=MARK, id=3)
    assert crossed(Token(text=HALF, special=True, data=b"\xff")) == Token(text=MARK, special=True, data=b"\xff")
    assert crossed(InferResponse(outputs=[Tensor(name=HALF, data=np.zeros(1))])).outputs[0].name == MARK
    [[ended]] = Frames().feed(b"".join(frames_of([encoded(Ended(1, "error", HALF))])))
    assert ended == Ended(1, "error", MARK)
