"""What a gateway and an instance of a model say to each other: messages, and the frames that carry them.

A frame is a length (u32, big-endian) and a MessagePack array of messages: all that was posted in one turn of the loop. A
message is an array whose first element says which it is. Both sides are of one version, which `Hello` says, so that no
message is ever unknown. Nothing is pickled: bytes from an instance are a peer's, and what does not decode ends it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import msgspec
import numpy as np

from gateway.codecs.formatting import JSONBounds
from gateway.instances.memory import SMALLEST, Block, Window
from models.messages import (
    BytesTensor,
    Finish,
    InferRequest,
    InferResponse,
    Parameter,
    Part,
    PartKind,
    Prompt,
    Tensor,
    Token,
    utf8,
)
from models.session import Call
from protocols.events import Buffer
from protocols.v2.tensors import DATATYPES, BytesData, V2Error, decode_binary, encode_binary

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">IBI")  # and the head of a MessagePack array
_ARRAY = 0xDD
LARGEST = 2**31
"""Bytes of a message, at most."""
_DIMS = 64  # of numpy's arrays

MESSAGES_AHEAD, BYTES_AHEAD = 16, 256 * 1024
"""What each side of a session may send before the other has taken it. One message that is larger goes alone."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message, as an array of its tag and its fields."""


# -- about the model -------------------------------------------------------------------------------------------------------


@final
class Hello(_Message, frozen=True, tag=0):
    """An instance's first word."""

    version: str


@final
class Folder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A folder with a model."""

    path: str
    shown: str
    """Its path as the errors have it."""
    code: bool
    """Whether it has a model.py, which may run."""
    size: int
    """Bytes of its files."""


@final
class Describe(_Message, frozen=True, tag=1):
    """Imports the factory, and says what it makes: one of the model's folder, where there is one."""

    name: str
    factory: str
    options: dict[str, Any]
    folder: Folder | None = None


@final
class Described(_Message, frozen=True, tag=2):
    """The fields of the ModelSpec that say something else than its defaults, but what can only be called there."""

    fields: dict[str, Any]
    input_formatter: bool
    """True if the model has one."""
    output_formatter: bool = False


@final
class Load(_Message, frozen=True, tag=3):
    """Loads the model, and calls it with its own warm-up. `threads`: blocking steps at once; the others are ModelSpec's.
    If another gateway has had it loaded already, only the answer is sent."""

    threads: int
    step_timeout: float = 0.0
    stop_within: float = 0.0
    stuck_limit: int = 0


@final
class Loaded(_Message, frozen=True, tag=4):
    """The model is there. What it says itself of the fields that its spec leaves open."""

    parameters: list[str] | None
    chat_template: bool
    count_tokens: bool


@final
class Failed(_Message, frozen=True, tag=5):
    """Importing, loading or background work of the model raised: its type and text, and where."""

    error: str
    trace: str
    ended: bool = False
    """The context of `load()` is over, and nothing was raised."""
    configuration: bool = False
    """The text says what is wrong with the factory, for who has configured it."""
    memory: bool = False
    """There was none left."""
    refusal: str = ""
    """And of a folder which error of the gateway's it is."""


@final
class Ping(_Message, frozen=True, tag=7):
    """Asks whether the loop still runs."""

    number: int


@final
class Pong(_Message, frozen=True, tag=8):
    """It does."""

    number: int


@final
class Ask(_Message, frozen=True, tag=9):
    """Calls `chat_template` or `count_tokens` of the model."""

    number: int
    function: str
    argument: Any


@final
class Returned(_Message, frozen=True, tag=10):
    """What it has returned, or raised."""

    number: int
    value: Any
    error: Ended | None


@final
class ReadInput(_Message, frozen=True, tag=12):
    """Calls the input formatter with a request, for a `Returned` with the request of the schema that it makes of it, and
    whether the author's code writes the answer. The result stays there by this number until `Forget`."""

    number: int
    id: str
    content: bytes
    properties: dict[str, str]
    bounds: JSONBounds
    model: str
    options: dict[str, str]


@final
class GivenInput(_Message, frozen=True, tag=13):
    """Has a request stay there, likewise, that no input formatter has read. Without an answer."""

    number: int
    id: str
    text: str
    parameters: dict[str, Any]
    stream: bool


@final
class Write(_Message, frozen=True, tag=14):
    """Calls the output formatter with one more token of an answer, and those of the prompt before it, for a `Returned` with
    its text. `request` is the number of the ReadInput or GivenInput."""

    number: int
    request: int
    tokens: list[Token]


@final
class Forget(_Message, frozen=True, tag=15):
    """A request is over that is there by this number."""

    request: int


@final
class Log(_Message, frozen=True, tag=11):
    """A record of `logging` in the instance."""

    logger: str
    level: int
    text: str
    trace: str


# -- about a session -------------------------------------------------------------------------------------------------------


@final
class Open(_Message, frozen=True, tag=20):
    """Calls the model. `seconds` are left until its deadline; below zero there is none."""

    session: int
    call: Call
    seconds: float


@final
class Text(_Message, frozen=True, tag=21):
    """A token of which all but these is as usual."""

    session: int
    text: str
    id: int
    log_prob: float | None


@final
class Said(_Message, frozen=True, tag=22):
    """Any other token, or the end of a sequence."""

    session: int
    token: Token | None
    finish: Finish | None


@final
class Asked(_Message, frozen=True, tag=23):
    """A prompt."""

    session: int
    prompt: Prompt


@final
class PartSaid(_Message, frozen=True, tag=24):
    """A part. Where there is a block, its data are there; before it is sent they are any buffer."""

    session: int
    data: bytes
    utf8: bool
    last: bool
    block: Block | None = None


@final
class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor: its bytes as v2's binary form has them. Where there is a block, they are there; before it is sent they are
    any buffer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    parameters: dict[str, Any]
    whole: tuple[int, ...]
    block: Block | None = None


@final
class Tensors(_Message, frozen=True, tag=25):
    """A request of tensors, or a response: those have no `outputs`."""

    session: int
    arrays: list[Array]
    id: str
    parameters: dict[str, Any]
    outputs: list[str] | None
    last: bool


@final
class EndOfInput(_Message, frozen=True, tag=26):
    """The client says no more."""

    session: int


@final
class Credit(_Message, frozen=True, tag=27):
    """So much was taken."""

    session: int
    messages: int
    size: int


@final
class Cancel(_Message, frozen=True, tag=28):
    """Nobody wants the session any more: the model is cancelled, and says so when it has ended."""

    session: int


@final
class Head(_Message, frozen=True, tag=29):
    """Fields for the head of the answer; `accepted`: it goes out now."""

    session: int
    fields: dict[str, str]
    accepted: bool


@final
class PromptTokens(_Message, frozen=True, tag=30):
    """How many tokens the prompt has."""

    session: int
    count: int | None


@final
class Ended(_Message, frozen=True, tag=31):
    """The model has returned from a session, or raised.

    `kind` is empty where it has returned, `cancelled` where it was, `error` for a ModelError, `context` for a
    ContextLengthExceeded, `memory` for a MemoryError, `large` for a LargerThanMemory, `input` and `closed` where it received
    or sent on after the end, and `raised` for anything else."""

    session: int
    kind: str = ""
    text: str = ""
    code: str = ""
    status: int = 0
    trace: str = ""
    tokens: tuple[int, int, int | None] | None = None
    lingers: bool = False
    """Threads of it still run. Another one follows when they have returned."""


@final
class Free(_Message, frozen=True, tag=32):
    """Blocks of memory that the other side has lent, and that nobody looks at any more."""

    keys: list[int]


@final
class Stuck(_Message, frozen=True, tag=40):
    """A session is stuck there: a `step` ran for too long, or it goes on after its end. `stack` has where its threads are;
    `replaced`: others take their places, else there are too many. Session 0 is one of another gateway's."""

    session: int
    step: bool
    stack: str
    replaced: bool


Message: TypeAlias = (
    Hello | Describe | Described | Load | Loaded | Failed | Ping | Pong | Ask | Returned | Log
    | Open | Text | Said | Asked | PartSaid | Tensors | EndOfInput | Credit | Cancel | Head | PromptTokens | Ended | Free
    | Stuck | ReadInput | GivenInput | Write | Forget
)  # fmt: skip
Item: TypeAlias = Text | Said | Asked | PartSaid | Tensors
ITEMS = (Text, Said, Asked, PartSaid, Tensors)
"""Those that carry a message of the model's family, and cost credit."""
MESSAGES = (Token, Finish, Part, InferResponse, Prompt, InferRequest)
"""And those messages."""


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):
        return item
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(f"{type(value).__name__} cannot go to a model's process, or come from one")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])
_one: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_SURE = frozenset((Text, PartSaid, EndOfInput, Credit, Cancel, Ping, Pong, Free, ReadInput, Write, Forget))
"""Those whose fields nobody but us has filled, or whose types `item_of` has looked at."""


def encoded(message: Message) -> bytes:
    """A message as it will be in a frame, which the other side can read: structs do not look at their fields' types, and one
    frame that cannot be read ends the instance. TypeError, OverflowError or ValueError for what cannot be sent."""
    try:
        data = _encoder.encode(message)
        if type(message) not in _SURE:
            _one.decode(data)
    except UnicodeEncodeError:
        return encoded(_mended(message))
    except RecursionError:
        raise ValueError("what is nested so deeply cannot go to a model's process, or come from one") from None
    return data


def beyond_64_bits(value: Any, name: str = "") -> str:
    """The name of what is an integer that MessagePack does not have, somewhere in this; empty where there is none."""
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else name
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inner = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(name, one) for one in value]
    elif isinstance(value, msgspec.Struct):
        inner = [(field, getattr(value, field)) for field in value.__struct_fields__]
    return next((found for key, one in inner if (found := beyond_64_bits(one, key))), "")


def _mended(message: Message) -> Message:
    """The message with texts that UTF-8 has: half of a surrogate pair, as of the name of a file, becomes U+FFFD."""
    texts = _texts_of(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain))
    return msgspec.convert(texts, type(message))


def _texts_of(value: Any) -> Any:
    match value:
        case str():
            return utf8(value).decode()
        case dict():
            return {_texts_of(key): _texts_of(one) for key, one in value.items()}
        case list() | tuple():
            return [_texts_of(one) for one in value]
        case _:
            return value


def frames_of(messages: Sequence[bytes]) -> Iterator[bytes]:
    """Frames of these, each `encoded`: of some 256 KiB, or of one message that is longer."""
    first = size = 0
    for at, message in enumerate(messages, 1):
        size += len(message)
        if size >= BYTES_AHEAD or at == len(messages):
            yield b"".join((_HEAD.pack(size + 5, _ARRAY, at - first), *messages[first:at]))
            first, size = at, 0


@final
class Frames:
    """Takes bytes as they come, and gives whole frames."""

    def __init__(self) -> None:
        self.unread = list[Message]()
        """Messages that whoever has read so far has left for the next one."""
        self._begun = bytearray()
        self._wanted = 0  # bytes of the frame that has begun, its length included; 0: not known yet

    def feed(self, data: bytes | bytearray | memoryview) -> Iterable[list[Message]]:
        """The messages of each frame that is whole by now. ValueError for bytes that are none."""
        begun = self._begun
        begun += data
        at = 0
        while True:
            if not self._wanted and len(begun) - at >= _LENGTH.size:
                self._wanted = _LENGTH.size + _LENGTH.unpack_from(begun, at)[0]
                if self._wanted > _HEAD.size + LARGEST + BYTES_AHEAD:
                    raise ValueError(f"a frame of {self._wanted} bytes")
            if not self._wanted or len(begun) - at < self._wanted:
                break
            with memoryview(begun) as view:
                body = view[at + _LENGTH.size : at + self._wanted]
                try:
                    found = _decoder.decode(body)
                except RecursionError:
                    raise ValueError("a frame that is nested too deeply") from None
                finally:
                    body.release()
            at += self._wanted
            self._wanted = 0
            yield found
        if at:
            del begun[:at]


# -- messages of the models' families --------------------------------------------------------------------------------------

_LOG_PROBS = frozenset((float, type(None)))


def item_of(session: int, message: object) -> tuple[Item, int]:
    """The item that carries a message of a model, and the bytes that it costs. TypeError for what is none, ValueError for
    an array that is not of its tensor's datatype."""
    kind = type(message)
    if kind is Token:
        token: Token = message  # type: ignore[assignment]
        if (
            type(token.text) is str and type(token.id) is int and type(token.log_prob) in _LOG_PROBS
            and token.finish is None and not token.top and not token.data and not token.special and not token.prefill
            and not token.sequence and token.prompt_tokens is None and not token.stop
        ):  # fmt: skip
            return Text(session, token.text, token.id, token.log_prob), len(token.text)
        return Said(session, token, None), len(token.text) + memoryview(token.data).nbytes
    if isinstance(message, Part):
        data: Any = message.data
        if type(data) is not bytes:
            view = memoryview(data)
            data = view.cast("B") if view.nbytes >= SMALLEST and view.c_contiguous else view.tobytes()
        return PartSaid(session, data, message.kind is PartKind.UTF8, bool(message.last)), len(data)
    if isinstance(message, Finish):
        return Said(session, None, message), 0
    if isinstance(message, Prompt):
        return Asked(session, message), len(message.text)
    if isinstance(message, InferRequest):
        arrays = [_array_of(tensor) for tensor in message.inputs]
        outputs = [str(name) for name in message.outputs]
        return Tensors(session, arrays, message.id, dict(message.parameters), outputs, message.last), _size(arrays)
    if isinstance(message, InferResponse):
        arrays = [_array_of(tensor) for tensor in message.outputs]
        return Tensors(session, arrays, message.id, dict(message.parameters), None, True), _size(arrays)
    raise TypeError(f"{kind.__name__} is no message of a model")


def large_of(item: Item) -> Sequence[Buffer]:
    """What of an item goes through shared memory, where there is some."""
    if type(item) is Text:  # most are
        return ()
    if isinstance(item, Tensors):
        return [array.data for array in item.arrays if len(array.data) >= SMALLEST]
    return [item.data] if isinstance(item, PartSaid) and len(item.data) >= SMALLEST else ()


def lent_in(item: Item, blocks: Sequence[Block]) -> Item:
    """The item with those in these blocks."""
    left = iter(blocks)
    if isinstance(item, PartSaid):
        return msgspec.structs.replace(item, data=b"", block=next(left))
    assert isinstance(item, Tensors)
    arrays = [
        msgspec.structs.replace(array, data=b"", block=next(left)) if len(array.data) >= SMALLEST else array
        for array in item.arrays
    ]
    return msgspec.structs.replace(item, arrays=arrays)


def message_of(item: Item, window: Window | None = None) -> tuple[Any, int]:
    """The message that an item carries, and the bytes that it costs. ValueError for one that cannot be, as where it has
    blocks of no `window`, or wrong ones."""
    if type(item) is Text:
        return Token(text=(text := item.text), id=item.id, log_prob=item.log_prob), len(text)
    match item:
        case Said(token=Token() as token):
            return token, len(token.text) + len(token.data)
        case Said(finish=Finish() as finish):
            return finish, 0
        case PartSaid():
            kind = PartKind.UTF8 if item.utf8 else PartKind.BINARY
            data = _data_of(item, window)
            return Part(data=data, kind=kind, last=item.last), len(data)
        case Asked():
            return item.prompt, len(item.prompt.text)
        case Tensors():
            datas = [memoryview(_data_of(array, window)) for array in item.arrays]
            tensors = tuple([_tensor_of(array, data) for array, data in zip(item.arrays, datas, strict=True)])
            size = sum([len(data) for data in datas])
            if item.outputs is None:
                return InferResponse(outputs=tensors, id=item.id, parameters=item.parameters), size
            request = InferRequest(
                inputs=tensors, id=item.id, parameters=item.parameters, outputs=tuple(item.outputs), last=item.last
            )
            return request, size
    raise ValueError("a message without a message")


def _data_of(item: Array | PartSaid, window: Window | None) -> bytes | memoryview:
    if item.block is None:
        return item.data
    if window is None or item.data:
        raise ValueError("a block where there can be none")
    return window.view(item.block)


def _size(arrays: Sequence[Array]) -> int:
    return sum([len(array.data) for array in arrays])


def _array_of(tensor: Tensor) -> Array:
    given: Any = tensor.given if isinstance(tensor, BytesTensor) else tensor.data
    shape = tuple([int(size) for size in np.shape(given)])
    try:
        buffers: list[Any] = encode_binary(given, tensor.datatype)
    except V2Error as e:
        raise ValueError(f"tensor {str(tensor.name)[:60]!r}: {e.message}") from None
    parameters: Mapping[str, Parameter] = tensor.parameters
    data = buffers[0] if buffers else b""
    return Array(str(tensor.name), tensor.datatype, shape, data, dict(parameters), tuple(tensor.whole))


def _tensor_of(array: Array, view: memoryview) -> Tensor:
    if array.datatype not in DATATYPES or len(array.shape) > _DIMS or any(size < 0 for size in array.shape):
        raise ValueError(f"tensor {array.name[:60]!r}: no such datatype or shape")
    try:
        data: Any = decode_binary(array.datatype, array.shape, view, array.name)
    except V2Error as e:
        raise ValueError(e.message) from None
    kind = BytesTensor if type(data) is BytesData else Tensor
    return kind(name=array.name, data=data, datatype=array.datatype, parameters=array.parameters, whole=array.whole)
