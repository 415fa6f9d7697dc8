"""The messages between a gateway and an instance of a model, and the frames that carry them.

A frame is a length (u32, big-endian) and a MessagePack array of the messages that were posted in one turn of the loop. A
message is an array; its first element is the type. `Hello` checks that both sides have the same version, so that no type is
unknown. Nothing is pickled: bytes from an instance are not trusted, and a frame that does not decode ends the instance.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import msgspec
import numpy as np

from gateway.codecs.formatting import JSONBounds
from gateway.instances.memory import SMALLEST, Block, Window
from models.errors import ModelError
from models.messages import (
    BytesTensor,
    Finish,
    Image,
    InferRequest,
    InferResponse,
    Parameter,
    Part,
    PartKind,
    Prompt,
    Sound,
    Tensor,
    Token,
    ToolCall,
    utf8,
)
from models.session import Call
from protocols.events import Buffer
from protocols.v2.tensors import DATATYPES, BytesData, V2Error, decode_binary, encode_binary

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">IBI")  # and the head of a MessagePack array
_ARRAY = 0xDD
LARGEST = 2**31
"""The most bytes of a message."""
_DIMS = 64  # the most dimensions of a numpy array

MESSAGES_AHEAD, BYTES_AHEAD = 16, 256 * 1024
"""The messages and bytes that each side of a session may send before the other has taken them. A larger message is sent
alone."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message, as an array of its tag and its fields."""


# -- about the model -------------------------------------------------------------------------------------------------------


@final
class Hello(_Message, frozen=True, tag=0):
    """The first message of an instance."""

    version: str


@final
class Folder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A folder that contains a model."""

    path: str
    shown: str
    """The name of the folder in errors."""
    code: bool
    """True if the folder has a model.py, which may run."""
    size: int
    """Bytes of all files."""


@final
class Describe(_Message, frozen=True, tag=1):
    """Asks the instance to import the factory, or the model of `folder`, and to describe it."""

    name: str
    factory: str
    options: dict[str, Any]
    folder: Folder | None = None


@final
class Described(_Message, frozen=True, tag=2):
    """The description of the model."""

    fields: dict[str, Any]
    """The fields of the ModelSpec, without those that can only be called in the process."""
    input_formatter: bool
    """True if the model has an input formatter."""
    output_formatter: bool = False
    """True if the model has an output formatter."""


@final
class Load(_Message, frozen=True, tag=3):
    """Asks the instance to load the model and to call it with the warm-up of its code. If another gateway has loaded it
    already, the instance only answers."""

    threads: int
    """The most blocking steps at once. The other fields are those of ModelSpec."""
    step_timeout: float = 0.0
    stop_within: float = 0.0
    stuck_limit: int = 0


@final
class Loaded(_Message, frozen=True, tag=4):
    """The model is loaded. The fields are properties that the loaded model may have in place of its spec."""

    parameters: list[str] | None
    """The parameters that the model declares; None if it declares none."""
    chat_template: bool
    """True if the model or its spec has a `chat_template`."""
    count_tokens: bool
    """True if the model or its spec has a `count_tokens`."""
    context: int = 0
    """The most tokens of a prompt and its answer together; 0: unknown."""
    features: list[str] = []
    """The features that the model declares."""
    check_format: bool = False
    """True if the model has a `check_format`."""


@final
class Failed(_Message, frozen=True, tag=5):
    """Importing, loading or background work of the model has failed."""

    error: str
    """The type and the text of the error."""
    trace: str
    """The traceback."""
    ended: bool = False
    """True if the context of `load()` has ended without an error."""
    configuration: bool = False
    """True if the factory is wrong; the text says how, for the author of the configuration."""
    memory: bool = False
    """True if memory ran out."""
    refusal: str = ""
    """The name of the gateway's error class, for an error in a model's folder; default empty."""


@final
class Ping(_Message, frozen=True, tag=7):
    """Asks for a `Pong`, which shows that the loop runs."""

    number: int


@final
class Pong(_Message, frozen=True, tag=8):
    """The answer to a `Ping`."""

    number: int


@final
class Ask(_Message, frozen=True, tag=9):
    """Asks the instance to call `chat_template`, `count_tokens` or `check_format` of the model."""

    number: int
    function: str
    argument: Any


@final
class Returned(_Message, frozen=True, tag=10):
    """The result of a question: what the function has returned or raised."""

    number: int
    """The number of the question."""
    value: Any
    error: Ended | None
    """The error that the function has raised; None if it has returned."""


@final
class ReadInput(_Message, frozen=True, tag=12):
    """Asks the instance to call the input formatter with a request. The `Returned` has the request of the schema that the
    formatter makes, and True if the author's code writes the answer. The instance keeps the result until `Forget`."""

    number: int
    id: str
    content: bytes
    properties: dict[str, str]
    bounds: JSONBounds
    model: str
    options: dict[str, str]


@final
class GivenInput(_Message, frozen=True, tag=13):
    """Gives the instance a request that no input formatter has read, for the output formatter. It is kept until `Forget`.
    There is no answer."""

    number: int
    id: str
    text: str
    parameters: dict[str, Any]
    stream: bool


@final
class Write(_Message, frozen=True, tag=14):
    """Asks the instance to call the output formatter with one more token of an answer, after those of the prompt. The
    `Returned` has the text. `request` is the number of the ReadInput or GivenInput."""

    number: int
    request: int
    tokens: list[Token]


@final
class Forget(_Message, frozen=True, tag=15):
    """Asks the instance to forget the request of a ReadInput or GivenInput."""

    request: int


@final
class Log(_Message, frozen=True, tag=11):
    """A record that was logged in the instance."""

    logger: str
    level: int
    text: str
    trace: str


# -- about a session -------------------------------------------------------------------------------------------------------


@final
class Open(_Message, frozen=True, tag=20):
    """Opens a session: calls the model. `seconds` are left until the deadline; negative: there is none."""

    session: int
    call: Call
    seconds: float


@final
class Text(_Message, frozen=True, tag=21):
    """A token whose other fields have their defaults: the frequent case."""

    session: int
    text: str
    id: int
    log_prob: float | None


@final
class Said(_Message, frozen=True, tag=22):
    """A token with other fields set, the end of a sequence, or a piece of a call of a tool."""

    session: int
    token: Token | None
    finish: Finish | None
    call: ToolCall | None = None


@final
class Asked(_Message, frozen=True, tag=23):
    """A prompt."""

    session: int
    prompt: Prompt


@final
class PartSaid(_Message, frozen=True, tag=24):
    """A part. If `block` is set, the bytes are in shared memory. Before it is sent, `data` may be any buffer."""

    session: int
    data: bytes
    utf8: bool
    last: bool
    block: Block | None = None


@final
class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor, with its bytes in v2's binary form. If `block` is set, they are in shared memory. Before it is sent, `data`
    may be any buffer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    parameters: dict[str, Any]
    whole: tuple[int, ...]
    block: Block | None = None


@final
class Tensors(_Message, frozen=True, tag=25):
    """A request of tensors, or a response, whose `outputs` are None."""

    session: int
    arrays: list[Array]
    id: str
    parameters: dict[str, Any]
    outputs: list[str] | None
    last: bool


@final
class EndOfInput(_Message, frozen=True, tag=26):
    """The client sends no more messages in the session."""

    session: int


@final
class Credit(_Message, frozen=True, tag=27):
    """The receiver has taken this many messages and bytes of a session."""

    session: int
    messages: int
    size: int


@final
class Cancel(_Message, frozen=True, tag=28):
    """Cancels the model in a session. The instance sends `Ended` when it has ended."""

    session: int


@final
class Head(_Message, frozen=True, tag=29):
    """Fields for the head of the answer. `accepted`: the head is sent now."""

    session: int
    fields: dict[str, str]
    accepted: bool


@final
class PromptTokens(_Message, frozen=True, tag=30):
    """The number of tokens in the prompt; None if the model has unset it."""

    session: int
    count: int | None


@final
class Ended(_Message, frozen=True, tag=31):
    """The model has returned from a session, or raised.

    `kind` is empty if it has returned, `cancelled` if it was cancelled, `error` for a ModelError, `context` for a
    ContextLengthExceeded, `memory` for a MemoryError, `large` for a LargerThanMemory, `input` and `closed` if it received
    or sent after the end, and `raised` for any other error."""

    session: int
    kind: str = ""
    text: str = ""
    code: str = ""
    status: int = 0
    trace: str = ""
    tokens: tuple[int, int, int | None] | None = None
    lingers: bool = False
    """True if threads of the session still run. A second `Ended` follows when they have returned."""


@final
class Free(_Message, frozen=True, tag=32):
    """Gives back blocks of memory that the other side has lent."""

    keys: list[int]


@final
class Stuck(_Message, frozen=True, tag=40):
    """A session is stuck: a `step` ran for too long, or the session goes on after its end. `stack` is the stack of its
    threads. `replaced`: other threads take their places; False if too many sessions are stuck already. Session 0 stands for
    one of another gateway."""

    session: int
    step: bool
    stack: str
    replaced: bool


@final
class Locate(_Message, frozen=True, tag=41):
    """Asks where the code of a session waits. The `Returned` has the author's line and the stack, as two texts; both are
    empty if the session has ended."""

    number: int
    session: int


Message: TypeAlias = (
    Hello | Describe | Described | Load | Loaded | Failed | Ping | Pong | Ask | Returned | Log
    | Open | Text | Said | Asked | PartSaid | Tensors | EndOfInput | Credit | Cancel | Head | PromptTokens | Ended | Free
    | Stuck | ReadInput | GivenInput | Write | Forget | Locate
)  # fmt: skip
Item: TypeAlias = Text | Said | Asked | PartSaid | Tensors
ITEMS = (Text, Said, Asked, PartSaid, Tensors)
"""Messages that carry a message of the model's family, and cost credit."""
MESSAGES = (Token, Finish, Part, InferResponse, Prompt, InferRequest, ToolCall)
"""The messages of the models' families."""


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
_SURE = frozenset((Text, PartSaid, EndOfInput, Credit, Cancel, Ping, Pong, Free, ReadInput, Write, Forget, Locate))
"""Messages whose fields come from the gateway's code alone, or whose types `item_of` has checked."""


def encoded(message: Message) -> bytes:
    """Encodes a message for a frame, and checks that the other side can decode it: structs do not check the types of their
    fields, and one undecodable frame ends the instance. TypeError, OverflowError or ValueError if it cannot be sent."""
    try:
        data = _encoder.encode(message)
        if type(message) not in _SURE:
            _one.decode(data)
    except UnicodeEncodeError:
        return encoded(_mended(message))
    except RecursionError:
        raise ValueError("a value that is nested so deeply cannot go to a model's process, or come from one") from None
    return data


def beyond_64_bits(value: Any, name: str = "") -> str:
    """Returns the name of an integer in `value` that MessagePack cannot represent; empty if there is none."""
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
    """Returns the message with valid UTF-8 texts: a lone surrogate, as in the name of a file, becomes U+FFFD."""
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
    """Yields frames of `encoded` messages. A frame ends with the message that takes it to 256 KiB or more."""
    first = size = 0
    for at, message in enumerate(messages, 1):
        size += len(message)
        if size >= BYTES_AHEAD or at == len(messages):
            yield b"".join((_HEAD.pack(size + 5, _ARRAY, at - first), *messages[first:at]))
            first, size = at, 0


@final
class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self.unread = list[Message]()
        """Messages that one reader of the stream leaves for the next."""
        self._begun = bytearray()
        self._wanted = 0  # bytes of the frame that has begun, including its length; 0: not known yet

    def feed(self, data: bytes | bytearray | memoryview) -> Iterable[list[Message]]:
        """Takes bytes, and yields the messages of each frame that is complete. ValueError for an invalid frame."""
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
    """Returns the item that carries a model's message, and the bytes that it costs. TypeError if `message` is not a model's
    message; ModelError for an array that is not of its tensor's datatype."""
    kind = type(message)
    if kind is Token:
        token: Token = message  # type: ignore[assignment]
        if (
            type(token.text) is str and type(token.id) is int and type(token.log_prob) in _LOG_PROBS
            and token.finish is None and not token.top and not token.data and not token.special and not token.prefill
            and not token.sequence and token.prompt_tokens is None and not token.stop and not token.thinking
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
        return Asked(session, message), _size_of_prompt(message)
    if isinstance(message, InferRequest):
        arrays = [_array_of(tensor) for tensor in message.inputs]
        outputs = [str(name) for name in message.outputs]
        return Tensors(session, arrays, message.id, dict(message.parameters), outputs, message.last), _size(arrays)
    if isinstance(message, InferResponse):
        arrays = [_array_of(tensor) for tensor in message.outputs]
        return Tensors(session, arrays, message.id, dict(message.parameters), None, True), _size(arrays)
    if isinstance(message, ToolCall):
        return Said(session, None, None, message), len(message.arguments) + len(message.text)
    raise TypeError(f"{kind.__name__} is not a message of a model")


def _size_of_prompt(prompt: Prompt) -> int:
    parts = [part for message in prompt.messages for part in message.parts if isinstance(part, Image | Sound)]
    return len(prompt.text) + sum([len(message.content) for message in prompt.messages]) + sum([len(p.data) for p in parts])


def large_of(item: Item) -> Sequence[Buffer]:
    """Returns the buffers of an item that go through shared memory, if there is some."""
    if type(item) is Text:  # the frequent case
        return ()
    if isinstance(item, Tensors):
        return [array.data for array in item.arrays if len(array.data) >= SMALLEST]
    return [item.data] if isinstance(item, PartSaid) and len(item.data) >= SMALLEST else ()


def lent_in(item: Item, blocks: Sequence[Block]) -> Item:
    """Returns the item with these blocks in place of its large buffers."""
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
    """Returns the message that an item carries, and the bytes that it costs. ValueError for an invalid item, such as one
    with a wrong block, or with a block though there is no `window`."""
    if type(item) is Text:
        return Token(text=(text := item.text), id=item.id, log_prob=item.log_prob), len(text)
    match item:
        case Said():
            return _said_in(item)
        case PartSaid():
            kind = PartKind.UTF8 if item.utf8 else PartKind.BINARY
            data = _data_of(item, window)
            return Part(data=data, kind=kind, last=item.last), len(data)
        case Asked():
            return item.prompt, _size_of_prompt(item.prompt)
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


def _said_in(item: Said) -> tuple[Token | ToolCall | Finish, int]:
    if (token := item.token) is not None:
        return token, len(token.text) + len(token.data)
    if (call := item.call) is not None:
        return call, len(call.arguments) + len(call.text)
    if item.finish is None:
        raise ValueError("a message without a message")
    return item.finish, 0


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
        raise ModelError(f"tensor {str(tensor.name)[:60]!r}: {e.message}", code="BadOutput", status=e.status) from None
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
